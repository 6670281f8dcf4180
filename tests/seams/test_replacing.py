"""Functions of a trainer are replaced wherever modules hold them, and come back."""

import sys
from types import ModuleType

import pytest

from evenload.errors import ConfigError, MissingPackageError
from evenload.seams.replacing import replace


def deal(lengths, parts, equal=True):
    return "theirs"


def module_of(monkeypatch, name: str, **values) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(values)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def ours(answer="ours"):
    def deal(lengths, parts, equal=True, *, cost="none"):
        return answer, cost

    return deal


@pytest.fixture
def trainer(monkeypatch):
    """A trainer's module, one that imported its function by name, and one that gave it another name."""
    deciding = module_of(monkeypatch, "a_trainer", deal=deal)
    by_name = module_of(monkeypatch, "a_trainer_loop", deal=deal)
    renamed = module_of(monkeypatch, "a_recipe", share=deal)
    return lambda: (deciding.deal([], 2), by_name.deal([], 2), renamed.share([], 2))


def test_all_modules_get_it_and_give_it_back(trainer, monkeypatch):
    replaced = replace("a_trainer", {ours(): {"cost": 3}}, "a trainer 1.0")
    assert trainer() == (("ours", 3),) * 3
    late = module_of(monkeypatch, "imported_later", deal=sys.modules["a_trainer"].deal)
    replaced.uninstall()
    assert trainer() == ("theirs",) * 3
    assert late.deal([], 2) == "theirs"
    replaced.uninstall()
    assert trainer() == ("theirs",) * 3


def test_a_block_gives_it_back_after_an_error_too(trainer):
    def failing():
        with replace("a_trainer", {ours(): {"cost": 3}}, "a trainer 1.0"):
            assert trainer() == (("ours", 3),) * 3
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert trainer() == ("theirs",) * 3


def test_other_arguments_are_refused_and_nothing_is_replaced(trainer, monkeypatch):
    module_of(monkeypatch, "a_new_release", deal=lambda lengths, parts: "theirs", other=deal)
    with pytest.raises(ConfigError, match=r"a_new_release.deal takes \(lengths, parts\), other arguments than .* 1.0"):
        replace("a_new_release", {ours(): {"cost": 3}}, "a trainer 1.0")
    with pytest.raises(ConfigError, match=r"there is no a_trainer.cut; this seam was tested with a trainer 1.0"):
        replace("a_trainer", {ours(): {"cost": 3}}, "a trainer 1.0", ("cut",))
    with pytest.raises(ConfigError, match=r"a_trainer.deal takes"):
        replace("a_trainer", {ours(): {}}, "a trainer 1.0")  # `cost` is no argument of theirs
    assert trainer() == ("theirs",) * 3


def test_twice_is_refused(trainer):
    function = ours()
    with replace("a_trainer", {function: {"cost": 3}}, "a trainer 1.0"):
        with pytest.raises(ConfigError, match=r"replaced already; uninstall\(\) that first"):
            replace("a_trainer", {function: {"cost": 4}}, "a trainer 1.0")
        assert trainer() == (("ours", 3),) * 3


def test_a_trainer_that_is_not_installed_is_named():
    with pytest.raises(MissingPackageError, match=r"a_missing_trainer cannot be imported .* install a trainer 1.0"):
        replace("a_missing_trainer", {ours(): {"cost": 3}}, "a trainer 1.0")
