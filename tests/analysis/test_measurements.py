"""Ranks, similarity and maps of inputs with known results, in fp64."""

import math

import numpy as np
import pytest
import torch

from mgk.analysis import effective_number, spectra
from mgk.analysis.attention_maps import LOWEST, PALETTE, MapAccumulator, levels, png
from mgk.analysis.components import other_assignment
from mgk.analysis.ranks import MAX_SVD_SIZE, max_matrices
from mgk.analysis.similarity import SimilarityAccumulator
from mgk.analysis.weights import Block

CPU = torch.device("cpu")


def with_values(values, rows, columns):
    """Return a matrix with these singular values."""
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64))[0]
    return (left * values) @ right.mT


@pytest.mark.parametrize("size", [(40, 40), (40, 70), (300, 300), (200, 310), (310, 200)], ids=str)
@pytest.mark.parametrize("largest", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("rank", [1, 17, 39])
def test_rank_of_a_known_spectrum(size, largest, rank):
    """Singular values from `largest` down to 7 % above 1e-6, then below it; at 300, AᵀA alone is not exact enough."""
    above = torch.logspace(math.log10(largest), -5.97, rank, dtype=torch.float64)
    below = torch.logspace(-6.03, -11, min(size) - rank, dtype=torch.float64)
    matrices = torch.stack([with_values(torch.cat([above, below]), *size) for _ in range(2)])
    assert spectra(matrices).rank.tolist() == [rank, rank]


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [1.0, 300.0])
def test_rank_of_a_known_spectrum_on_a_gpu(largest):
    """Many matrices of different rank: several streams, and for 300 all are counted after deflation."""
    ranks = list(range(20, 220, 10))
    matrices = torch.stack(
        [
            with_values(
                torch.cat(
                    [
                        torch.logspace(math.log10(largest), -5.97, rank, dtype=torch.float64),
                        torch.logspace(-6.03, -11, 256 - rank, dtype=torch.float64),
                    ]
                ),
                256,
                256,
            )
            for rank in ranks
        ]
    )
    assert spectra(matrices.cuda()).rank.tolist() == ranks


def test_gram_path_is_tested():
    assert MAX_SVD_SIZE < 200


@pytest.mark.parametrize("size", [50, 200])
@pytest.mark.parametrize("rank", [1, 5, 20])
def test_rank_of_a_product_of_stochastic_factors(size, rank):
    left, right = (torch.rand(3, size, rank, dtype=torch.float64) for _ in range(2))
    matrices = (left / left.sum(-1, keepdim=True)) @ (right / right.sum(1, keepdim=True)).mT
    assert matrices.sum(-1).allclose(torch.ones(3, size, dtype=torch.float64))
    assert spectra(matrices).rank.tolist() == [rank] * 3


@pytest.mark.parametrize("size", [60, 240])
def test_rank_with_a_sink_equals_the_number_of_singular_values(size):
    """With nearly all attention on one key ‖A‖² is near the size, and AᵀA alone cannot resolve 1e-12."""
    x = torch.randn(size, 16, dtype=torch.float64)
    logits = x @ x.mT / 8
    logits[:, 0] += 14
    matrix = logits.softmax(-1)
    assert torch.linalg.matrix_norm(matrix, 2) ** 2 > size / 2
    expected = int((torch.linalg.svdvals(matrix) > 1e-6).sum())
    assert 16 < expected < size
    assert spectra(matrix[None]).rank.item() == expected


@pytest.mark.parametrize("size", [64, 256])
def test_threshold_and_effective_rank(size):
    values = torch.zeros(size, dtype=torch.float64)
    values[:10] = 0.5
    values[10:20] = 0.01
    matrix = with_values(values, size, size)[None]
    assert spectra(matrix, threshold=0.1).rank.item() == 10
    assert spectra(matrix).rank.item() == 20
    shares = values[:20] / values.sum()
    expected = math.exp(-float((shares * shares.log()).sum()))
    assert spectra(matrix).effective_rank.item() == pytest.approx(expected, rel=1e-4)
    assert spectra(torch.eye(size)[None]).effective_rank.item() == pytest.approx(size)
    assert spectra(torch.zeros(1, size, size)).effective_rank.item() == 0
    assert spectra(torch.zeros(1, size, size)).rank.item() == 0


def test_spectra_rejects_a_single_matrix():
    with pytest.raises(ValueError, match="matrices"):
        spectra(torch.eye(3))


def test_max_matrices_within_memory():
    assert max_matrices(4000, 4000, 1 << 20) == 0
    assert max_matrices(100, 100, 1 << 30) > 100


def similarity(maps, outputs=None):
    """Return the similarity of maps [H, L, S] and outputs [H, L, E], added in blocks of rows."""
    sums = SimilarityAccumulator(maps.shape[0], None if outputs is None else outputs.shape[-1], CPU)
    for part in maps.split(7, dim=1):
        sums.add_maps(part)
    if outputs is not None:
        for part in outputs.split(5, dim=1):
            sums.add_outputs(part)
    return sums.similarity()


def test_identical_heads():
    one = torch.rand(20, 20, dtype=torch.float64).softmax(-1)
    output = torch.randn(40, 6, dtype=torch.float64)
    turned = output @ torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0] * 3 + 5
    result = similarity(torch.stack([one] * 4), torch.stack([output, output, turned, output]))
    assert np.allclose(result.divergence, 0, atol=1e-12)
    assert np.allclose(result.cosine, 1)
    assert np.allclose(result.cka, 1)
    assert result.groups == [0, 0, 0, 0]
    for number in result.different.values():
        assert number == pytest.approx(1, abs=1e-5)


def test_orthogonal_heads():
    """Heads attend to disjoint keys, and their outputs are orthogonal."""
    maps = torch.zeros(4, 12, 16, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([torch.ones(40, 1), torch.randn(40, 12)], 1).double())[0][:, 1:]
    for head in range(4):
        maps[head, :, 4 * head : 4 * head + 4] = torch.rand(12, 4).double().softmax(-1)
    result = similarity(maps, basis.reshape(40, 4, 3).transpose(0, 1))
    off = ~np.eye(4, dtype=bool)
    assert np.allclose(result.divergence[off], 1)
    assert np.allclose(result.cosine[off], 0)
    assert np.allclose(result.cka[off], 0, atol=1e-12)
    assert result.groups == [0, 1, 2, 3]
    for number in result.different.values():
        assert number == pytest.approx(4)


def test_two_pairs_of_equal_heads_count_as_two():
    maps = torch.zeros(4, 9, 10, dtype=torch.float64)
    for head in range(4):
        part = head % 2
        maps[head, :, 5 * part : 5 * part + 5] = torch.linspace(0, 1, 5).double().softmax(-1)
    result = similarity(maps)
    assert result.different["maps"] == pytest.approx(2)
    assert result.groups == [0, 1, 0, 1]
    assert sorted(result.order[:2]) in ([0, 2], [1, 3])


def test_divergence_and_cosine_by_hand():
    maps = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]]).double()
    result = similarity(maps)
    mean = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert result.divergence[0, 1] == pytest.approx((mean - 0.5) / 2)
    assert result.cosine[0, 1] == pytest.approx(1 / math.sqrt(1.5 * 1))


def test_rows_with_one_visible_key_are_skipped():
    maps = torch.zeros(2, 3, 3, dtype=torch.float64)
    maps[:, 0, 0] = 1
    maps[0, 1:, 0] = 1
    maps[1, 1:, 1] = 1
    assert similarity(maps).divergence[0, 1] == pytest.approx(1)


def test_cka_by_hand_and_with_a_large_mean():
    x, y = torch.randn(60, 3, dtype=torch.float64), torch.randn(60, 3, dtype=torch.float64)
    result = similarity(torch.rand(2, 4, 4).double(), torch.stack([x + 1e4, y])).cka
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (x.mT @ y).square().sum() / ((x.mT @ x).norm() * (y.mT @ y).norm())
    assert result[0, 1] == pytest.approx(expected.item(), rel=1e-8)


def test_effective_number():
    assert effective_number(np.eye(5)) == pytest.approx(5)
    assert effective_number(np.ones((5, 5))) == pytest.approx(1)
    half = np.full((3, 3), 0.5) + np.eye(3) / 2
    shares = np.array([2 / 3, 1 / 6, 1 / 6])
    assert effective_number(half) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_pooled_maps_hold_mean_and_max(pooling):
    weights = torch.rand(2, 23, 17, dtype=torch.float64).softmax(-1)
    sums = MapAccumulator("layer1", 2, 23, 17, 6, None, CPU)
    for start in range(0, 23, 3):
        sums.add(slice(start, min(start + 3, 23)), weights[:, start : start + 3])
    maps = sums.maps()
    assert maps.factor == 4
    for i in range(6):
        for j in range(5):
            cell = weights[:, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten(1)
            expected = cell.mean(1) if pooling == "mean" else cell.amax(1)
            assert maps.pooled[pooling][:, i, j].tolist() == levels(expected, 17).tolist()


def weight_of_level(level, keys):
    """Invert `levels`, as the report's script does."""
    return 10 ** (LOWEST + (level - 1) / 254 * (math.log10(keys) - LOWEST)) / keys


def test_levels_can_be_inverted():
    weights = torch.tensor([0.0, 1e-4, 0.01, 0.3, 1.0]).double()
    result = levels(weights, 100)
    assert result[0] == 0
    assert result[-1] == 255
    for weight, level in zip(weights[2:].tolist(), result[2:].tolist(), strict=True):
        assert weight_of_level(level, 100) == pytest.approx(weight, rel=0.02)


def test_tiles_are_parts_of_the_map(tmp_path):
    from matplotlib import image

    length = 1100
    weights = torch.rand(1, length, length, dtype=torch.float64).softmax(-1)
    weights[:, :512, 512:1024] = 0
    sums = MapAccumulator("layer1", 1, length, length, 256, tmp_path, CPU)
    for start in range(0, length, 300):
        sums.add(slice(start, min(start + 300, length)), weights[:, start : start + 300])
    maps = sums.maps()
    assert maps.tile_columns == 3
    assert len(maps.tiles[0]) == 9
    assert maps.tiles[0][1] == ""
    palette = np.frombuffer(PALETTE, np.uint8).reshape(256, 3)
    tile = image.imread(tmp_path / maps.tiles[0][5])[..., :3]
    expected = palette[levels(weights[0, 512:1024, 1024:], length).numpy()]
    assert np.array_equal((tile * 255).round().astype(np.uint8), expected)
    assert not list(tmp_path.glob(".*"))


def test_png_without_palette_is_grey(tmp_path):
    from matplotlib import image

    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    (tmp_path / "x.png").write_bytes(png(pixels))
    assert np.array_equal((image.imread(tmp_path / "x.png") * 255).round(), pixels)


@pytest.mark.parametrize("hard", [False, True])
def test_other_assignment_keeps_the_mask(hard):
    """Soft to hard and hard to soft, from the weights and the scores of the components."""
    unweighted = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    scores = unweighted + torch.tensor([0.2, 0.5, 0.3]).double().log()[:, None]
    hidden = torch.rand(2, 5, 6) < 0.3
    hidden[..., 0] = False
    logits = {False: scores.logsumexp(2), True: unweighted.amax(2)}
    weights = {which: x.masked_fill(hidden, -math.inf).softmax(-1) for which, x in logits.items()}
    result = other_assignment(Block(slice(0, 5), weights[hard], scores, unweighted), hard)
    assert result.allclose(weights[not hard])
