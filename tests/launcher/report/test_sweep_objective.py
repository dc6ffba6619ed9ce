import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.sweep_table import JobObjective, JobRow, comparison

SIDE = {"step_s": 0.01, "sent_bytes": 8, "peak_bytes": {"0": 1e6}}
REPORT: Any = SimpleNamespace(
    ranks=2,
    last_loss=0.5,
    measured=SIDE,
    foreseen=SIDE,
    tokens_per_s=100.0,
    validation={"loss": 0.75, "accuracy": 0.9, "loss_by_rank": [0.7, 0.8]},
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", 0.5),
        ("step_s", 0.01),
        ("tokens_per_s", 100.0),
        ("validation.loss", 0.75),
        ("validation.accuracy", 0.9),
    ],
)
def test_a_job_returns_its_number_with_its_report(name: str, value: float) -> None:
    found = JobObjective.of(name, REPORT)
    assert isinstance(found, float) and found == value and found.outcome is REPORT


def test_a_job_that_failed_or_a_sweep_without_objective_returns_the_outcome() -> None:
    error = RunError("rank 1", "it was killed.")
    assert JobObjective.of("loss", error) is error
    assert JobObjective.of("", REPORT) is REPORT


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_metrics_and_says_which_job_is_best(width: int) -> None:
    jobs = [JobRow(("optim.lr=0.5",), RunError("rank 1", "it was killed."))]
    for k, loss in enumerate((0.5, 0.25, float("nan"), 1.0)):
        found = {"validation": {"loss": loss, "accuracy": loss / 4, "loss_by_rank": [loss]}}
        jobs.append(JobRow((f"optim.lr={k}",), SimpleNamespace(**{**vars(REPORT), **found})))
    for objective, said in {"": "validation_loss: job 2", "validation.accuracy": "job 4"}.items():
        out, config = io.StringIO(), OmegaConf.create({"sweep": {"objective": objective}})
        Console(file=out, width=width).print(comparison(jobs, width, config))
        lines = [line.strip() for line in out.getvalue().splitlines() if len(line) <= width]
        assert "accuracy" in lines[1] and "0.0625" in lines[5] and lines[5].startswith("2")
        assert lines[-1].startswith("best ") and lines[-1].endswith(said)


def test_an_objective_that_is_no_result_is_refused() -> None:
    recipe = "recipe=mlp_hybrid"
    load([recipe, "sweep.objective=validation.accuracy"])
    with pytest.raises(RecipeError, match=r"validation\.acc is not a result") as refused:
        load([recipe, "sweep.objective=validation.acc"])
    assert "loss, step_s, tokens_per_s, validation.loss or validation.accuracy" in str(
        refused.value.instead
    )
    with pytest.raises(RecipeError, match="nothing is evaluated"):
        load([recipe, "sweep.objective=validation.loss", "eval.batches=0"])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # optuna's
def test_optuna_minimises_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml  # type: ignore[import-untyped]

    from flowrun.launcher.command_line import hydra_jobs

    def train(cfg: Any, words: list[str], config_dir: str | None) -> Any:
        return SimpleNamespace(**{**vars(REPORT), "last_loss": abs(cfg.optim.lr - 0.3)})

    monkeypatch.setattr(hydra_jobs, "_job", train)
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweep.dir=out"]
    given = ["recipe=mlp_hybrid", "sweep.objective=loss", "optim.lr=choice(0.1, 0.3, 0.9)"]
    outcomes = hydra_jobs.hydra_jobs([*sweeper, *given], ["--multirun"], None)
    assert len(outcomes) == 6
    found = yaml.safe_load((tmp_path / "out" / "optimization_results.yaml").read_text())
    best = min(outcomes, key=lambda outcome: outcome.last_loss).last_loss
    assert found["best_value"] == pytest.approx(best) and found["name"] == "optuna"
