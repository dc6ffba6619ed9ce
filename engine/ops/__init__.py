"""What is known of each op, one family a file: rows (signatures), local programs, traits, cost.

signature.py table.py   a row; the rows that an op brings itself
registry.py             target -> rows, local program: read this first
traits.py memory.py   views, draws and the like; where a result lies
expansions/             an op as several, where its layout needs communication inside
"""
