import json
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe_errors import explain
from flowrun.launcher.text.prompts import Prompt, read_prompts


def test_lines_and_rows_are_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("def \n\nnaïve\n")
    rows = [{"prompt": "def "}, {"id": 7, "prompt": "two\nlines"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(tmp_path / "p.txt") == [
        Prompt(f"{tmp_path}/p.txt, line 1", "def "),
        Prompt(f"{tmp_path}/p.txt, line 3", "naïve"),
    ]
    texts = [each.text for each in read_prompts(tmp_path / "p.jsonl")]
    assert texts == ["def ", "two\nlines"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "p.jsonl",
            b'{"promt": "a"}',
            "p.jsonl, line 1\n  there is no 'prompt' in it; it has promt.",
        ),
        ("p.jsonl", b'{"prompt": 3}', "p.jsonl, line 1\n  'prompt' is not text: int 3."),
        ("p.jsonl", b"", "p.jsonl holds no row."),
        ("p.jsonl", b"{", "p.jsonl, line 1, column 2 is not JSON"),
        ("p.txt", b"\n\n", "p.txt\n  it holds no prompt."),
        ("p.txt", b"\xff", "p.txt\n  'utf-8' codec can't decode byte 0xff"),
        ("other.txt", b"a", "p.txt\n  there is no such file."),
    ],
)
def test_what_holds_no_prompts_is_refused(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_prompts(tmp_path / name.replace("other", "p"))
    assert problem in explain(caught.value, [])
