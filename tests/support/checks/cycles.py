"""Cycles of a graph: sets of nodes that reach each other (Tarjan, 1972)."""

from collections.abc import Iterator, Mapping, Set

Graph = Mapping[str, Set[str]]  # node -> the nodes that its arrows end at


def cycles(graph: Graph) -> list[set[str]]:
    """Strongly connected sets of two and more nodes.  Each end of an arrow is a node itself."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[set[str]]:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for end in sorted(graph[node]):
            if end not in index:
                yield from visit(end)
                lowest[node] = min(lowest[node], lowest[end])
            elif end in stack:
                lowest[node] = min(lowest[node], index[end])
        if lowest[node] == index[node]:
            place = stack.index(node)
            yield set(stack[place:])
            del stack[place:]

    components = [each for node in graph if node not in index for each in visit(node)]
    return [component for component in components if len(component) > 1]
