"""What a check may use and must leave as it was."""

import torch
from torch import nn

from guava_nb.protocol.messages import Cell
from guava_nb.replica.one_step_check.set_aside import copying, names_kept, set_aside
from guava_nb.spec.cells import build_module


def test_gradients_and_buffers_go_back_where_the_model_was_used() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).sum().backward()
    gradients, mean = [p.grad for p in model.parameters()], model[1].running_mean.clone()
    with set_aside(model) as is_touched:
        assert not is_touched()
        model(torch.randn(4, 2)).sum().backward()
        assert is_touched()
    assert all(p.grad is one for p, one in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(model[1].running_mean, mean)


def test_modules_are_found_as_copies_and_all_else_as_it_is() -> None:
    module = nn.Linear(2, 2)
    assert copying(lambda name: module)("loss") is not module
    assert copying(lambda name: len)("step") is len


MODELS, NEWEST = [], {}


class Noted(nn.Linear):
    last = None

    def __init__(self) -> None:
        super().__init__(2, 2)
        global newest
        newest = Noted.last = NEWEST["model"] = self
        MODELS.append(self)


def test_what_a_factory_notes_of_itself_is_that_of_the_run_again() -> None:
    run = Noted()
    with names_kept([Noted]):
        copy = Noted()
        assert newest is Noted.last is NEWEST["model"] is MODELS[-1] is copy
    assert newest is Noted.last is NEWEST["model"] is MODELS[-1] is run
    assert len(MODELS) == 1


def test_names_of_a_shared_cell_are_kept_though_it_is_no_module_that_python_knows() -> None:
    text = (
        "from torch import nn\nBUILT = []\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
        "        BUILT.append(self)\n        globals()['late'] = self\n"
    )
    cell = build_module([Cell("cell", text)])
    with names_kept([cell.Net]):
        cell.Net()
        assert len(cell.BUILT) == 1 and cell.late is cell.BUILT[0]
    assert cell.BUILT == [] and not hasattr(cell, "late")


def test_names_of_a_notebook_or_script_are_its_user_s() -> None:
    main: dict[str, object] = {"__name__": "__main__"}
    exec("def build(): globals()['newest'] = 1", main)
    with names_kept([main["build"]]):
        main["build"]()  # type: ignore[operator]
    assert main["newest"] == 1


def test_names_of_installed_packages_are_left_alone() -> None:
    with names_kept([nn.Linear, torch.sum, len]):
        nn.added = 1  # type: ignore[attr-defined]
    assert nn.added == 1  # type: ignore[attr-defined]
    del nn.added  # type: ignore[attr-defined]
