"""ResNet, BERT, GPT-2 and InsightFace on one device: sizes as published, and what each promises."""

import pytest
import torch
from torch import Tensor, nn

from flowrun.models.bert import BERT
from flowrun.models.gpt import GPT
from flowrun.models.insightface import Backbone, MarginClasses, Scores
from flowrun.models.losses import margin_softmax
from flowrun.models.metrics import hit_rate
from flowrun.models.resnet import ResNet

PUBLISHED = {
    "ResNet-50": (lambda: ResNet([3, 4, 6, 3], 64, 1000), 25_557_032),
    "ResNet-101": (lambda: ResNet([3, 4, 23, 3], 64, 1000), 44_549_160),
    "BERT-base": (lambda: BERT(30522, 512, 12, 12, 768), 109_514_298),
    "GPT-2": (lambda: GPT(50257, 1024, 12, 12, 768, bias=True, tied=True), 124_439_808),
    "InsightFace r50": (lambda: Backbone([3, 4, 14, 3], 64, 112, 512), 43_590_848),
    "InsightFace r100": (lambda: Backbone([3, 13, 30, 3], 64, 112, 512), 65_156_160),
}


@pytest.mark.parametrize(("make", "parameters"), list(PUBLISHED.values()), ids=list(PUBLISHED))
def test_full_sizes_have_the_published_number_of_parameters(make, parameters) -> None:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters


# ---- ResNet --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("small", "side"), [(True, 4), (False, 1)])
def test_groups_and_a_large_stem_halve_the_image(small: bool, side: int) -> None:
    model = ResNet([1, 1, 1, 1], 4, 10, small_images=small)
    x = model.stem(torch.randn(2, 3, 32, 32))
    for group in model.groups:
        x = group(x)
    assert x.shape == (2, 128, side, side)


def test_the_stride_is_in_the_3x3_convolution() -> None:
    block = ResNet([1, 1], 4, 10).groups[1][0]
    assert block.spatial.conv.stride == (2, 2) and block.reduce.conv.stride == (1, 1)


def test_a_bottleneck_starts_as_its_shortcut() -> None:
    model = ResNet([2], 4, 10, small_images=True)
    x = torch.rand(2, 16, 8, 8)
    torch.testing.assert_close(model.groups[0][1](x), x)


# ---- BERT ----------------------------------------------------------------------------------------


def masked_batch(samples: int, masked: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(3)
    rows = [torch.randperm(8, generator=draws)[:masked] for _ in range(samples)]
    return {
        "tokens_BT": torch.randint(0, 11, (samples, 8), generator=draws),
        "segments_BT": torch.zeros(samples, 8, dtype=torch.long),
        "positions_BK": torch.stack(rows),
    }


def bert(**changes: object) -> BERT:
    torch.manual_seed(0)
    return BERT(11, 8, 2, 2, 8, **{"dropout": 0.0, **changes})  # type: ignore[arg-type]


def test_logits_are_those_of_the_masked_positions() -> None:
    model, batch = bert(), masked_batch(2, 3)
    everywhere = dict(batch, positions_BK=torch.arange(8).expand(2, 8))
    rows = torch.arange(2)[:, None]
    torch.testing.assert_close(model(**batch), model(**everywhere)[rows, batch["positions_BK"]])


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_to_the_embedding_or_not(tied: bool) -> None:
    model = bert(tied=tied)
    assert (model.head.out.weight is model.embed.token.weight) == tied


def test_bert_looks_ahead() -> None:
    model, batch = bert(), masked_batch(1, 1)
    batch["positions_BK"][:] = 0
    changed = dict(batch, tokens_BT=batch["tokens_BT"].clone())
    changed["tokens_BT"][0, 7] = 10 - changed["tokens_BT"][0, 7]
    assert not torch.equal(model(**batch), model(**changed))


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [BERT, GPT])
def test_dropout_acts_in_training_alone(model: type[nn.Module]) -> None:
    made = model(11, 8, 1, 2, 8, dropout=0.5)
    batch = masked_batch(2, 3) if model is BERT else {"tokens_BT": masked_batch(2, 3)["tokens_BT"]}
    assert not torch.equal(made(**batch), made(**batch))
    made.eval()
    assert torch.equal(made(**batch), made(**batch))


# ---- InsightFace ---------------------------------------------------------------------------------


def head(**changes: float) -> MarginClasses:
    torch.manual_seed(0)
    given: dict[str, float] = {"angle": 0.0, "scale": 8.0, **changes}
    return MarginClasses(12, 5, **given)  # type: ignore[arg-type]


def features() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(4, 5, generator=draws), torch.tensor([0, 7, 3, 11])


def test_without_margins_logits_are_scaled_cosines() -> None:
    model, (x, labels) = head(), features()
    found = model(x, labels)
    expected = 8 * torch.cosine_similarity(x[:, None], model.weight[None], dim=-1)
    torch.testing.assert_close(found.logits, expected)
    assert torch.equal(found.hits, torch.nn.functional.one_hot(labels, 12).bool())


@pytest.mark.parametrize(("angle", "cosine"), [(0.5, 0.0), (0.0, 0.4), (0.3, 0.2)])
def test_margins_change_the_own_class_alone(angle: float, cosine: float) -> None:
    (x, labels), rows = features(), torch.arange(4)
    plain = head()(x, labels).logits / 8
    found = head(angle=angle, cosine=cosine)(x, labels).logits / 8
    own = (plain[rows, labels].acos() + angle).cos() - cosine
    torch.testing.assert_close(found[rows, labels], own)
    found[rows, labels] = plain[rows, labels]
    torch.testing.assert_close(found, plain)


def test_evaluation_has_no_margin_and_sees_every_class() -> None:
    x, labels = features()
    model = head(angle=0.5, sample=8, groups=1).eval()
    torch.testing.assert_close(model(x, labels).logits, head()(x, labels).logits)


def test_a_sample_has_the_classes_of_the_batch_and_as_many_of_each_group() -> None:
    x, labels = features()
    model = MarginClasses(40, 5, angle=0.0, sample=16, groups=4)
    weight_KD, classes_K = model._sample_classes(labels, torch.arange(40))
    assert set(labels.tolist()) <= set(classes_K.tolist()) and len(set(classes_K.tolist())) == 16
    assert torch.equal(torch.bincount(classes_K // 10, minlength=4), torch.full((4,), 4))
    assert torch.equal(weight_KD, model.weight[classes_K])
    assert model(x, labels).hits.sum(1).tolist() == [1] * 4


def test_a_sample_of_all_classes_is_the_full_softmax() -> None:
    x, labels = features()
    whole, sampled = head(angle=0.3), head(angle=0.3, sample=12, groups=3)
    losses = [margin_softmax(model(x, labels), {}) for model in (whole, sampled)]
    torch.testing.assert_close(*losses)
    ways = zip(losses, (whole, sampled), strict=True)
    gradients = [torch.autograd.grad(loss, model.weight)[0] for loss, model in ways]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("sample", "groups", "said"),
    [
        (6, 2, "a batch of 4 may have more classes than the 3"),
        (10, 5, "do not divide into 5 groups"),
    ],
    ids=["too small for the batch", "groups that do not divide the classes"],
)
def test_a_sample_that_cannot_be_is_refused(sample: int, groups: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        head(sample=sample, groups=groups)(*features())


def test_margin_softmax_is_cross_entropy() -> None:
    x, labels = features()
    scores = head()(x, labels)
    expected = torch.nn.functional.cross_entropy(scores.logits, labels)
    torch.testing.assert_close(margin_softmax(scores, {}), expected)


def test_a_hit_is_a_sample_whose_own_class_has_the_largest_logit() -> None:
    hits = torch.tensor([[True, False], [True, False]])
    assert hit_rate(Scores(torch.tensor([[-1.0, -2.0], [-2.0, -1.0]]), hits), {}).item() == 0.5
