"""ListOps: rules, values, splits and LRA's files."""

import hashlib
import itertools
import statistics

import numpy as np
import pytest

from mgk.tasks import DataError, get_task
from mgk.tasks.listops import (
    LISTOPS,
    SYMBOLS,
    TOKENS,
    ListOps,
    Rules,
    evaluate_expression,
    generate_block,
    generate_examples,
    grow_trees,
    read_tsv,
)

LONG = Rules()
SHORT = Rules(max_depth=4, max_args=5, longer_than=9, shorter_than=61)
SMALL = ListOps(name="small", rules=SHORT, counts={"test": 30, "dev": 20, "train": 200, "fresh": 40}, reads_tsv=False)


def parse(tokens):
    """Return (operator, arguments) of an expression, or a digit; only the symbols are those of the package."""
    symbols = [SYMBOLS[token - 1] for token in tokens]
    position = 0

    def expression():
        nonlocal position
        symbol = symbols[position]
        position += 1
        if symbol.isdigit():
            return int(symbol)
        arguments = []
        while symbols[position] != "]":
            arguments.append(expression())
        position += 1
        return (symbol, arguments)

    tree = expression()
    assert position == len(symbols)
    return tree


def value(tree):
    if isinstance(tree, int):
        return tree
    operator, arguments = tree[0], [value(argument) for argument in tree[1]]
    return {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda values: int(statistics.median(values)),
        "[SM": lambda values: sum(values) % 10,
    }[operator](arguments)


def depth(tree):
    return 1 if isinstance(tree, int) else 1 + max(map(depth, tree[1]))


def arities(tree):
    return [] if isinstance(tree, int) else [len(tree[1]), *itertools.chain(*map(arities, tree[1]))]


def lra_text(tree):
    """Return the text in LRA's format, with parentheses around each argument."""
    if isinstance(tree, int):
        return str(tree)
    text = tree[0]
    for argument in [*map(lra_text, tree[1]), "]"]:
        text = f"( {text} {argument} )"
    return text


@pytest.mark.parametrize("rules, count", [(LONG, 100), (SHORT, 2000), (Rules(3, 2, 3, 20), 500)])
def test_examples_follow_the_rules_and_have_correct_labels(rules, count):
    deepest = most = 0
    for tokens, label in itertools.islice(generate_examples(rules, 3), count):
        tree = parse(tokens.tolist())
        assert label == value(tree) == evaluate_expression(tokens.tolist())
        assert rules.longer_than < len(tokens) < rules.shorter_than
        assert tokens.dtype == np.uint8
        deepest, most = max(deepest, depth(tree)), max(most, *arities(tree))
        assert min(arities(tree)) >= 2
    assert (deepest, most) == (rules.max_depth, rules.max_args)


def test_limits_of_the_length_are_exclusive():
    lengths = {len(tokens) for tokens, _ in itertools.islice(generate_examples(Rules(4, 5, 9, 13), 0), 300)}
    assert lengths == {10, 11, 12}


def test_random_choices_are_uniform():
    levels = grow_trees(np.random.PCG64(5), LONG, 20_000)
    assert len(levels) == LONG.max_depth - 1
    for level in levels[:-1]:
        assert level.nested.mean() == pytest.approx(0.25, abs=0.005)
    assert not levels[-1].nested.any()
    arity, operator = (np.concatenate([getattr(x, name) for x in levels]) for name in ("arity", "operator"))
    digit = np.concatenate([level.digit[~level.nested] for level in levels])
    for drawn, lowest, choices in ((arity, 2, 9), (operator, 0, 4), (digit, 0, 10)):
        shares = np.bincount(drawn - lowest) / len(drawn)
        assert shares == pytest.approx([1 / choices] * choices, rel=0.02)


def test_examples_of_a_seed_never_change():
    digest = hashlib.sha256()
    for tokens, label in generate_block(LONG, 0, 0) + generate_block(SHORT, 1, 7):
        digest.update(tokens.tobytes() + bytes([label]))
    assert digest.hexdigest()[:16] == "0b258aa57705ba7e"


def test_blocks_and_seeds_differ():
    first = [tokens.tobytes() for tokens, _ in generate_block(LONG, 0, 0)]
    for seed, number in ((0, 1), (1, 0)):
        assert not set(first) & {tokens.tobytes() for tokens, _ in generate_block(LONG, seed, number)}


def rows(split):
    return [split.tokens[a:b].tobytes() for a, b in itertools.pairwise(split.offsets.tolist())]


def test_examples_are_unique_and_independent_of_workers(tmp_path):
    SMALL.prepare(tmp_path / "one", 1)
    SMALL.prepare(tmp_path / "four", 4)
    everything = []
    for name, count in SMALL.counts.items():
        split = SMALL.split(tmp_path / "one", name)
        assert len(split) == count
        assert rows(split) == rows(SMALL.split(tmp_path / "four", name))
        everything += rows(split)
    assert len(set(everything)) == len(everything) == 290


@pytest.mark.parametrize(
    "text", ["", "]", "[MIN 1 2", "[MIN ]", "[MIN 1 2 ] ]", "1 2", "[MIN 1 2 ] 3", "[MIN [MAX ] 1 ]"]
)
def test_invalid_expression_raises(text):
    with pytest.raises(ValueError, match="brackets"):
        evaluate_expression([TOKENS[symbol] for symbol in text.split()])


def test_sizes_of_the_task():
    assert get_task("listops") is LISTOPS
    assert (LISTOPS.vocab_size, LISTOPS.num_classes, LISTOPS.max_length) == (32, 10, 2000)
    assert LISTOPS.counts == {"test": 2_000, "dev": 2_000, "train": 96_000, "fresh": 50_000}
    assert max(TOKENS.values()) == 15
    assert min(TOKENS.values()) == 1
    assert len(set(TOKENS.values())) == 15


@pytest.fixture
def lra(tmp_path):
    """Write LRA's three files with 6, 3 and 2 examples, and return a task that reads them."""
    examples = list(itertools.islice(generate_examples(SHORT, 0), 11))
    folder = tmp_path / "listops"
    folder.mkdir()
    counts = {"test": 2, "dev": 3, "train": 6, "fresh": 30}
    start = 0
    for name, file in (("train", "basic_train.tsv"), ("dev", "basic_val.tsv"), ("test", "basic_test.tsv")):
        selected = examples[start : start + counts[name]]
        start += counts[name]
        lines = ["Source\tTarget", *(f"{lra_text(parse(t.tolist()))}\t{v}" for t, v in selected)]
        (folder / file).write_text("\n".join(lines) + "\n")
    return tmp_path, ListOps(rules=SHORT, counts=counts), examples


def test_lra_files_are_read(lra):
    data, listops, examples = lra
    train = listops.split(data, "train")
    assert rows(train) == [tokens.tobytes() for tokens, _ in examples[:6]]
    assert train.labels.tolist() == [label for _, label in examples[:6]]
    assert rows(listops.split(data, "test")) == [tokens.tobytes() for tokens, _ in examples[9:]]
    assert listops.metadata(data)["source"] == "LRA's tsv files"
    # The files contain the start of the stream of the fresh examples, which must not repeat them.
    assert not {tokens.tobytes() for tokens, _ in examples} & set(rows(listops.split(data, "fresh")))


@pytest.mark.parametrize(
    "line, message",
    [
        ("( ( ( [MIN 1 ) 2 ) ] )", "1 columns"),
        ("( ( ( [MIN 1 ) 2 ) ] )\t1\t1", "3 columns"),
        ("( ( ( [MIN 1 ) 2 ) ] )\tx", "not a ListOps expression"),
        ("( ( ( [MOD 1 ) 2 ) ] )\t1", "not a ListOps expression"),
        ("( ( ( [MIN 1 ) 2 )\t1", "brackets do not match"),
        ("( ( ( [MIN 1 ) 2 ) ] )\t2", "target 2 but its expression is 1"),
        ("( ( ( [MIN 1 ) ² ) ] )\t1", "not a ListOps expression"),
        ("", "1 columns"),
    ],
)
def test_damaged_line_is_reported(tmp_path, line, message):
    path = tmp_path / "basic_train.tsv"
    path.write_text(f"Source\tTarget\n( ( ( [MIN 1 ) 2 ) ] )\t1\n{line}\n")
    with pytest.raises(DataError, match=f"basic_train.tsv, line 3 .*{message}"):
        list(read_tsv(path, 2, "read", lambda *_: None))
