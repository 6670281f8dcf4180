"""Functions of a trainer are replaced wherever modules hold them, and come back."""

import sys
from functools import partial
from types import ModuleType

import pytest

from evenload.errors import ConfigError, MissingPackageError
from evenload.seams.replacing import Replaced, module_of, require_release


def deal(lengths, parts, equal=True):
    return "theirs"


def new_module(monkeypatch, name: str, **values) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(values)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def ours(answer="ours"):
    def deal(lengths, parts, equal=True, *, cost="none"):
        return answer, cost

    return deal


def replace(name="a_trainer", cost=3):
    return Replaced("a trainer 1.0", (sys.modules[name], partial(ours(), cost=cost)))


@pytest.fixture
def trainer(monkeypatch):
    """A trainer's module, one that imported its function by name, and one that gave it another name."""
    deciding = new_module(monkeypatch, "a_trainer", deal=deal)
    by_name = new_module(monkeypatch, "a_trainer_loop", deal=deal)
    renamed = new_module(monkeypatch, "a_recipe", share=deal)
    return lambda: (deciding.deal([], 2), by_name.deal([], 2), renamed.share([], 2))


def test_all_modules_get_it_and_give_it_back(trainer, monkeypatch):
    replaced = replace()
    assert trainer() == (("ours", 3),) * 3
    late = new_module(monkeypatch, "imported_later", deal=sys.modules["a_trainer"].deal)
    replaced.uninstall()
    assert trainer() == ("theirs",) * 3
    assert late.deal([], 2) == "theirs"
    replaced.uninstall()
    assert trainer() == ("theirs",) * 3


def test_a_block_gives_it_back_after_an_error_too(trainer):
    def failing():
        with replace():
            assert trainer() == (("ours", 3),) * 3
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert trainer() == ("theirs",) * 3


class Sampler:
    def deal(self, lengths):
        return "theirs"


def test_a_method_is_replaced_for_all_who_have_the_class(trainer):
    def deal(self, lengths):
        return "ours", theirs(self, lengths)

    theirs = Sampler.deal
    with Replaced("1.0", (Sampler, deal), (sys.modules["a_trainer"], partial(ours(), cost=3))):
        assert Sampler().deal([]) == ("ours", "theirs")
        assert trainer() == (("ours", 3),) * 3
    assert Sampler.deal is theirs
    assert trainer() == ("theirs",) * 3


def test_other_arguments_are_refused_and_nothing_is_replaced(trainer, monkeypatch):
    new_module(monkeypatch, "a_new_release", deal=lambda lengths, parts: "theirs")
    with pytest.raises(ConfigError, match=r"a_new_release.deal takes \(lengths, parts\), other than in a trainer 1.0"):
        replace("a_new_release")
    with pytest.raises(ConfigError, match=r"a_trainer.deal takes"):
        Replaced("1.0", (sys.modules["a_trainer"], ours()))  # `cost` is no argument of theirs
    fine = sys.modules["a_trainer"], partial(ours(), cost=3)
    with pytest.raises(ConfigError, match=r"Replaced.deal does not exist"):
        Replaced("1.0", fine, (Replaced, deal))
    assert trainer() == ("theirs",) * 3


def test_twice_is_refused(trainer):
    with replace():
        with pytest.raises(ConfigError, match=r"a_trainer.deal is replaced already; uninstall\(\) that first"):
            replace(cost=4)
        assert trainer() == (("ours", 3),) * 3


def test_what_is_missing_is_named(trainer, monkeypatch):
    with pytest.raises(MissingPackageError, match=r"a_missing_trainer cannot be imported .* install a trainer 1.0"):
        module_of("a_missing_trainer", "a trainer 1.0")
    with pytest.raises(ConfigError, match=r"there is no a_trainer.cut; this seam was tested with a trainer 1.0"):
        module_of("a_trainer", "a trainer 1.0", ("deal", "cut"))
    with pytest.raises(MissingPackageError, match=r"a-missing-trainer is not installed; this seam was tested with 1.0"):
        require_release("a-missing-trainer", ("1.0",))


def test_releases_that_were_not_tested_are_refused(monkeypatch):
    monkeypatch.setattr("evenload.seams.replacing.version", lambda package: "5.23.1")
    assert require_release("a-trainer", ("5.22", "5.23")) == "a-trainer 5.23.1"
    with pytest.raises(ConfigError, match=r"a-trainer is 5.23.1, this seam was tested with 5.2 or 5.24"):
        require_release("a-trainer", ("5.2", "5.24"))
