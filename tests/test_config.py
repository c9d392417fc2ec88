"""The configuration object: its defaults, what it accepts, and what it says of a value it does not."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

import pyactcomp
from pyactcomp import codec
from pyactcomp.codec import format as fmt
from pyactcomp.compress import MODULE_OPTIONS
from pyactcomp.config import Config, Former
from pyactcomp.sizes import budget_of, bytes_of, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 << 30),
        (" 1.5 TB ", 1_500_000_000_000),
        ("0.1MiB", 104_858),  # to the nearest byte
        ("3KiB", 3 << 10),
        ("0GiB", 0),
        ("20gb", 20 * 10**9),
        *dict.fromkeys(("20", "GiB", "-1GiB", "1e3MiB", "1.MiB", "", "20 GiB a day", 20, None)).items(),
    ],
)
def test_texts_of_sizes(text: object, size: int | None) -> None:
    assert bytes_of(text) == size


def test_budgets_are_numbers_texts_or_auto() -> None:
    found = [budget_of(budget) for budget in (4096, "4096", "1.5KiB", "auto")]
    assert found == [4096, 4096, 1536, None]


def test_sizes_have_the_largest_unit_of_which_there_is_one() -> None:
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1024: "1.00 KiB", 1 << 20: "1.00 MiB", 3 << 29: "1.50 GiB"}
    sizes |= {(1 << 30) - 1: "1024.00 MiB", 5 << 40: "5.00 TiB", 1 << 51: "2048.00 TiB"}
    assert {size: size_text(size) for size in sizes} == sizes


def test_defaults_are_8_bits_in_groups_of_64_to_nearest() -> None:
    config = Config()
    assert (config.mode, config.group_size, config.rounding, config.impl) == ("int8", 64, "nearest", "auto")
    assert (config.seed, config.skip, config.keep_weight_copies, config.on_conflict) == (0, (), False, "raise")
    # 16,384 rows have statistics of 64 KiB in float32, which must stay below the limit.
    assert config.min_bytes > 16_384 * 4


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("mode", ("int8",)),
        ("group_size", fmt.GROUP_SIZES),
        ("rounding", codec.ROUNDINGS),
        ("impl", codec.IMPLS),
        ("on_conflict", ("raise", "skip")),
        ("keep_weight_copies", (True, False)),
        ("compile_blocks", (True, False)),
        ("seed", (0, 1, 2**64 - 1)),
        ("min_bytes", (0, 1, 2**63 - 1)),
        ("skip", ((), ("layer.0", torch.nn.Linear))),
    ],
)
def test_every_documented_value_is_accepted(option: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(Config(**{option: value}), option) == value


def test_skip_becomes_a_tuple_whatever_sequence_it_was() -> None:
    expected = ("a", torch.nn.GELU)
    for skip in (["a", torch.nn.GELU], ("a", torch.nn.GELU), iter(["a", torch.nn.GELU])):
        assert Config(skip=skip).skip == expected  # type: ignore[arg-type]


def test_config_is_frozen_comparable_hashable_and_picklable() -> None:
    config = Config(group_size=128, skip=["a"], seed=3)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        config.seed = 4  # type: ignore[misc]
    assert config == Config(group_size=128, skip=("a",), seed=3)
    assert config != Config(group_size=64, skip=("a",), seed=3)
    assert hash(config) == hash(Config(group_size=128, skip=("a",), seed=3))
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, seed=0).seed == 0


def test_config_takes_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        Config("int8")  # type: ignore[misc]


WRONG = [
    ("mode", "int4", ValueError),
    ("mode", "", ValueError),
    ("mode", None, ValueError),
    ("mode", ["int8"], ValueError),
    ("group_size", 32, ValueError),
    ("group_size", 64.0, ValueError),
    ("group_size", "64", ValueError),
    ("rounding", "down", ValueError),
    ("rounding", True, ValueError),
    ("impl", "gpu", ValueError),
    ("impl", None, ValueError),
    ("on_conflict", "ignore", ValueError),
    ("keep_weight_copies", "yes", ValueError),
    ("keep_weight_copies", None, ValueError),
    ("compile_blocks", "yes", ValueError),
    ("compile_blocks", None, ValueError),
    ("seed", -1, ValueError),
    ("seed", 2**64, ValueError),
    ("seed", 1.0, TypeError),
    ("seed", True, TypeError),
    ("seed", None, TypeError),
    ("min_bytes", -1, ValueError),
    ("min_bytes", 2**63, ValueError),
    ("min_bytes", "128KiB", TypeError),
    ("min_bytes", 1e6, TypeError),
    ("skip", "layer", TypeError),
    ("skip", torch.nn.Linear, TypeError),
    ("skip", None, TypeError),
    ("skip", 3, TypeError),
    ("skip", [3], TypeError),
    ("skip", [None], TypeError),
    ("skip", [int], TypeError),
    ("skip", [torch.nn.Linear(1, 1)], TypeError),
]


@pytest.mark.parametrize(
    ("option", "value", "error"), WRONG, ids=lambda value: None if isinstance(value, type) else repr(value)[:20]
)
def test_a_wrong_value_is_named_with_what_was_got(option: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Config(**{option: value})
    message = str(caught.value)
    got = value[0] if isinstance(value, list) and option == "skip" else value
    assert message.startswith(option)
    assert repr(got) in message


@pytest.mark.parametrize("option", ["bits", "modes", "Seed", ""])
def test_an_unknown_option_is_a_type_error(option: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        Config(**{option: 8})


def test_every_option_is_documented_where_an_editor_shows_it() -> None:
    """``help(compress)`` describes each option; those that go with the next release stand in ``Config``."""
    for field in fields(Config):
        documented = Config.__doc__ if field.name in Former.__annotations__ else pyactcomp.compress.__doc__
        assert f"    {field.name} : " in (documented or ""), field.name


@pytest.mark.parametrize(
    ("function", "without"),
    [(pyactcomp.compress, set()), (pyactcomp.compressed, set(MODULE_OPTIONS))],
    ids=["compress", "compressed"],
)
def test_signatures_spell_out_every_option(function: Callable[..., Any], without: set[str]) -> None:
    keywords = {
        name: (parameter.default, parameter.annotation)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "plan"  # which says what blocks do, no option
    }
    assert keywords == {
        f.name: (f.default, f.type) for f in fields(Config) if f.name not in without | Former.__annotations__.keys()
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("mode", "lossless"), ("group_size", 128), ("rounding", "stochastic"), ("seed", 7), ("min_bytes", 0)),
        *(("skip", [torch.nn.Linear]), ("impl", "reference"), ("unknown", "int8"), ("attention", "int8")),
        *(("keep_weight_copies", True), ("on_conflict", "skip"), ("fuse", False), ("fuse_head", True), ("tile", 7)),
        ("compile_blocks", True),
    ],
)
def test_every_option_reaches_the_configuration(option: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Config] = []
    monkeypatch.setattr(
        sys.modules["pyactcomp.compress"], "Config", lambda **options: asked.append(Config(**options)) or asked[-1]
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    calls = [lambda: pyactcomp.compress(model, **{option: value})]
    if option not in MODULE_OPTIONS:
        calls.append(lambda: pyactcomp.compressed(model, **{option: value}))
    for call in calls:
        with contextlib.suppress(ValueError):  # this model has no head to fuse
            call()
    expected = tuple(value) if option == "skip" else value
    assert [getattr(config, option) for config in asked] == [expected] * len(calls)


@pytest.mark.filterwarnings("always::DeprecationWarning")
@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("impl", "reference", "PYACTCOMP_IMPL"),
        ("rounding", "stochastic", "functional.Codes"),
        ("seed", 7, "leave it out"),
        ("on_conflict", "skip", "HookConflictError"),
        ("unknown", "int8", "register_reader"),
    ],
)
def test_a_former_option_warns_and_says_what_to_do_instead(option: str, value: Any, instead: str) -> None:
    model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
    calls: dict[str, Callable[[], Any]] = {
        "compress": lambda: pyactcomp.compress(model, **{option: value}),
        "compressed": lambda: pyactcomp.compressed(**{option: value}),
        "verify": lambda: pyactcomp.verify(model, x, torch.sum, **{option: value}),
    }
    for name, call in calls.items():
        with pytest.warns(DeprecationWarning, match=rf"^{name}\({option}=.*{instead}") as caught:
            call()
        assert [each.filename for each in caught if each.category is DeprecationWarning] == [__file__]
    with pytest.raises(TypeError, match=r"compressed\(\) got an unexpected keyword argument 'fuse'"):
        pyactcomp.compressed(fuse=True)  # type: ignore[call-arg]


def test_the_environment_names_one_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYACTCOMP_IMPL", "reference")
    assert Config().impl == "reference"
    monkeypatch.setenv("PYACTCOMP_IMPL", "gpu")
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"PYACTCOMP_IMPL must be one of .*'reference'.*got 'gpu'"):
        pyactcomp.compress(model)
    assert not model._forward_hooks
