"""What torch says of steps that spread layers cannot do, told as what to do.

Gathering a layer's parameters and moving split activations are autograd functions of torch and of this room, which a user
has never heard of.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from guava_nb.errors import GuavaError, TrainingError

__all__ = ["explained", "explaining_stages"]

#: Where the autograd functions of spread layers are called.
_HERE = Path(__file__).parent
#: IndexErrors that torch raises where labels or words do not fit the model.
_OF_A_BATCH = re.compile(r"^Target -?\d+ is out of bounds|index out of range in self")
_TORCHS_OWN = Path(torch.distributed.__file__).parent


def explained(error: BaseException, is_sharded: bool = False) -> TrainingError | None:
    """Return what an error of a step says to its user; None: it is about something else.

    Args:
        error: raised by forward or backward.
        is_sharded: by ZeRO 2 or 3; else layers are split in tensor mode, or none is spread.
    """
    if is_sharded and isinstance(error, AssertionError) and "does not support deepcopy" in str(error):
        return TrainingError(
            "the step copies the model (copy.deepcopy), and with ZeRO 2 and 3 each worker holds a part of it only: use data mode "
            "or zero_stage=1 (--zero 1)"
        )
    if not isinstance(error, RuntimeError):
        return None
    if "backward through the graph a second time" in str(error):
        return TrainingError(
            "the graph of this loss was used up by an earlier backward: the step called backward() on the loss that it returns "
            "(leave backward(), zero_grad() and optimizer.step() out of it, the run does them), or something that it kept "
            "from an earlier step, such as a hidden state, leads back into that step (detach() it)"
        )
    if is_sharded and "storage of size 0" in str(error):
        return TrainingError(
            "ZeRO 2 and 3 give a layer's parameters back after its forward, and the step needs them once more (a "
            "gradient of a gradient, as in a gradient penalty): use data mode or zero_stage=1 (--zero 1)"
        )
    if "setup_context" in str(error) and _called_by_spread_layer(error):
        layers, way = (
            ("ZeRO 2 and 3 gather a layer's parameters", "use data mode or zero_stage=1 (--zero 1)")
            if is_sharded
            else ("tensor mode moves split activations between workers", "use data mode")
        )
        return TrainingError(
            "the step calls the model inside a transform of torch.func (vmap, grad, jvp, jacrev, ...), and that cannot go "
            f"through the functions by which {layers}: {way}, or torch.autograd.grad instead of the transform"
        )
    return None


@contextmanager
def explaining_stages(stage: int, stages: int) -> Iterator[None]:
    """Say that what other stages keep is not here, where the user's code misses something.

    Args:
        stage: whose layers run here, from 0.
        stages: how many there are.

    Raises:
        TrainingError: instead of the KeyError, IndexError or AttributeError, or the TypeError on None.
    """
    try:
        yield
    except Exception as error:
        one: BaseException | None = error
        while one is not None and not _is_missing(one):
            one = one.__cause__
        if one is None or isinstance(error, GuavaError):
            raise
        raise TrainingError(
            f"{type(one).__name__}: {one} in a layer, a hook or the loss of stage {stage + 1} of {stages}. In pipeline mode each "
            "worker runs the layers of its stage only, so what layers and hooks of another stage keep (in a dict, a list, an "
            "attribute, a global) is not there. Hand it on as an output of the layer, keep these layers in one stage "
            "(pipeline_split=, --split), or take a mode without stages"
        ) from error


def _is_missing(error: BaseException) -> bool:
    """Whether something is not there that another stage may keep; a batch that does not fit is wrong in every mode."""
    if isinstance(error, AttributeError):
        return not isinstance(error.obj, str | int | float | list | tuple | torch.Tensor)
    if isinstance(error, IndexError):
        return not _OF_A_BATCH.search(str(error))
    is_none = isinstance(error, TypeError) and "NoneType" in str(error)
    return is_none or isinstance(error, KeyError)


def _called_by_spread_layer(error: BaseException) -> bool:
    """Whether the autograd function that torch speaks of is not the user's own."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    outside = [file for file in files if "autograd" not in file.parts and "_functorch" not in file.parts]
    return bool(outside) and any(folder in outside[-1].parents for folder in (_HERE, _TORCHS_OWN))
