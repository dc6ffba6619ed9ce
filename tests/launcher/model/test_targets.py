from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.clicks import Clicks
from flowrun.launcher.data.corpus.masked import Masked
from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.digits import Digits
from flowrun.launcher.data.images import Photographs
from flowrun.launcher.listeners.early_stopping import EarlyStopping
from flowrun.launcher.model.targets import find, make_function, make_object, note_moved
from flowrun.launcher.text.codec import is_bytes

OLD_TEXT = "flowrun.models.data.text.Text"


@pytest.mark.parametrize(
    ("old", "kind"),
    [
        (OLD_TEXT, Text),
        ("flowrun.models.data.digits.Digits", Digits),
        ("flowrun.models.data.photographs.Photographs", Photographs),
        ("flowrun.models.clicks.Clicks", Clicks),
        ("flowrun.models.callbacks.EarlyStopping", EarlyStopping),
    ],
)
def test_a_name_that_has_moved_is_found(old: str, kind: type) -> None:
    assert find(old, "data._target_") is kind


class Above:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, output: int, batch: object) -> bool:
        return output > self.least


def test_a_class_whose_objects_are_called_is_made_with_the_arguments_of_the_recipe() -> None:
    made = make_function({"_target_": f"{__name__}.Above", "least": 2}, "task.metrics.above")
    assert (made(3, {}), made(2, {})) == (True, False)


def test_a_data_set_within_another_is_found_by_its_old_name() -> None:
    source = {"_target_": OLD_TEXT, "length": 8, "max_bytes": 100}
    old = {"_target_": "flowrun.models.data.masked.Masked", "vocabulary": 256, "mask": 256}
    made = make_object({**old, "source": source}, "data")
    assert isinstance(made, Masked) and isinstance(made.source, Text)
    assert [*note_moved({**old, "source": source}, "data")] == [
        "data._target_=flowrun.models.data.masked.Masked is "
        "flowrun.launcher.data.corpus.masked.Masked by now",
        f"data.source._target_={OLD_TEXT} is flowrun.launcher.data.corpus.text.Text by now",
    ]


def test_ids_of_an_old_run_are_known_to_be_bytes() -> None:
    assert is_bytes({"_target_": OLD_TEXT})


def test_an_import_of_what_has_moved_says_where_to() -> None:
    Path("old_import.py").write_text("from flowrun.models.data.stacked import Rows\n")
    with pytest.raises(RecipeError, match=r"It is flowrun\.launcher\.data by now\."):
        find("old_import.Own", "data._target_")
