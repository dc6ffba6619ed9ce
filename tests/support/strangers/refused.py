"""Modules as strangers write them whose items make no batch, or of which no task can be guessed."""

from support.strangers.items import MLP, PICTURE

DATA = """
class Mine(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return {item}
"""


def _mine(item: str) -> str:
    return MLP + PICTURE + DATA.format(item=item)


# name -> (source after HEADER, what the error says)
REFUSED = {
    "labels_that_are_words": (
        _mine('torch.randn(8), ["cat", "dog"][i % 2]'),
        "the value '1' of item 0 is a str: no tensor can be made of it.\n"
        "  Return numbers in its place: a class as its index, text as ids, [*text.encode()].",
    ),
    "texts": (
        _mine('"some words", i % 3'),
        "the value '0' of item 0 is a str: no tensor can be made of it.",
    ),
    "no_labels": (
        _mine("torch.randn(8), None"),
        "the value '1' of item 0 is None: no tensor can be made of it.",
    ),
    "all_is_text": (_mine('f"line {i}"'), "item 0 is a str: no tensor can be made of it."),
    "unlike_lengths": (
        _mine("torch.randn(5 + i % 3), i % 3"),
        "field 'x' of items 0 and 1 is of shape (5,) and (6,): pad it to one shape",
    ),
    "lists_of_unlike_lengths": (
        _mine('{"x": [0.5] * (5 + i % 3), "label": i % 3}'),
        "field 'x' of items 0 and 1 is of shape (5,) and (6,): pad it to one shape",
    ),
    "images_of_unlike_sizes": (
        _mine("picture(i).resize((8 + i % 5, 8)), i % 3"),
        "field 'x' of items 0 and 1 is of shape (3, 8, 8) and (3, 8, 9): pad it to one shape",
    ),
    "an_item_that_fails": (_mine('open(f"{i}.png"), i'), "No such file or directory: '0.png'"),
    "a_loader": (
        MLP
        + """
def load_data():
    x = torch.randn(60, 8)
    return torch.utils.data.DataLoader(TensorDataset(x, x[:, 0]), batch_size=4)
""",
        "DataLoader makes batches; flowrun makes its own, of items.",
    ),
    "train_and_test_at_once": (
        MLP
        + """
def load_data():
    x = torch.randn(60, 8)
    return TensorDataset(x[:40], x[:40, 0]), TensorDataset(x[40:], x[40:, 0])
""",
        "this makes a tuple of data sets.\n  Name what makes one of them.",
    ),
    "a_stream": (
        MLP
        + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.randn(8), 1
""",
        "Stream gives its items in turn, and does not say how many",
    ),
    "a_model_that_fails": (
        MLP.replace("nn.Linear(8, hidden)", "nn.Linear(8, width)") + DATA.format(item="i, i"),
        "NameError: name 'width' is not defined",
    ),
}

# name -> (source after HEADER, keys that stay ???, what a note says)
GAPS = {
    "triplets": (
        MLP.replace("forward(self, x)", "forward(self, a, p, n)").replace(
            "return self.body(x)", "return self.body(a), self.body(p), self.body(n)"
        )
        + DATA.format(item="torch.randn(8), torch.randn(8), torch.randn(8)"),
        ["task.loss"],
        "task.loss is unknown: none fits: forward returns a tuple {float32 (2, 3), "
        "float32 (2, 3), float32 (2, 3)} for two items; left is no field",
    ),
    "outputs_of_another_shape": (
        _mine("torch.randn(8), torch.randn(4)"),
        ["task.loss"],
        "task.loss is unknown: none fits: forward returns float32 (2, 3) for two items; left is "
        "targets float32 (2, 4)",
    ),
    "two_data_sets": (
        _mine("torch.randn(8), i % 3") + _mine("torch.randn(8), i % 3").replace("Mine", "Yours"),
        ["data._target_", "task.inputs", "task.loss"],
        "--data NAME takes a data set; this module has of_two_data_sets.Mine, of",
    ),
    "no_data_set": (MLP, ["data._target_", "task.inputs", "task.loss"], "this module has none"),
}
