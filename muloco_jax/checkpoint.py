"""Checkpoints: all that a run needs to continue, in one atomic step, and theta alone.

A checkpoint is a folder `checkpoints/<step>` of a workdir, with theta, the rest of the
`DiLoCoState`, and what there is to know besides (JSON). It is written in the background
and appears under its name when it is whole; whatever a killed process left half done is
ignored and removed. Arrays may be restored onto any mesh.

This module hides orbax.
"""

import contextlib
import math
import pathlib
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers

from muloco_jax import tree
from muloco_jax.algorithm import DiLoCoState

PyTree = Any
FOLDER = "checkpoints"  # In a workdir.


class WriteError(OSError):
    """A checkpoint could not be written."""


class ReadError(OSError):
    """A checkpoint could not be read."""


class Checkpoints:
    """The checkpoints of a workdir; a context manager that waits for the last write.

    Orbax runs on all processes, which must share the folder.
    """

    def __init__(self, workdir: str | pathlib.Path, keep: int | None = None):
        """Opens the folder.

        Args:
            workdir: folder of the run.
            keep: how many of the latest checkpoints to keep; the best stays besides.
                None: only to read, perhaps while somebody else writes.
        """
        if keep is None:
            self._manager = _manager(workdir, create=False)
            return
        best = checkpoint_managers.BestN(get_metric_fn=_eval_loss, reverse=True, n=1)
        latest = checkpoint_managers.LatestN(keep)
        self._manager = _manager(
            workdir,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(
                [latest, best]
            ),
            cleanup_tmp_directories=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.wait()
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the latest checkpoint, if there is any."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: DiLoCoState,
        about: dict[str, Any],
        eval_loss: float | None = None,
    ) -> None:
        """Writes a checkpoint in the background.

        On return the state has been copied, and may be donated.

        Args:
            step: inner steps taken.
            state: the state.
            about: what there is to know besides, for JSON.
            eval_loss: of theta, if it was evaluated: what the best is chosen by.

        Raises:
            WriteError: if this checkpoint or the one before could not be written.
        """
        arguments = ocp.args.Composite(
            theta=ocp.args.StandardSave(state.params),
            state=ocp.args.StandardSave(state._replace(params=())),
            about=ocp.args.JsonSave(about),
        )
        metrics = {"eval_loss": math.inf if eval_loss is None else eval_loss}
        self.wait()
        with _named(WriteError, "a checkpoint could not be written"):
            self._manager.save(step, args=arguments, metrics=metrics, force=True)

    def wait(self) -> None:
        """Waits until the last checkpoint is there.

        Raises:
            WriteError: if it could not be written.
        """
        with _named(WriteError, "a checkpoint could not be written"):
            self._manager.wait_until_finished()

    def about(self, step: int) -> dict[str, Any]:
        """What `save` was told besides the state.

        Raises:
            ReadError: if it cannot be read.
        """
        arguments = ocp.args.Composite(about=ocp.args.JsonRestore())
        with _unreadable(self._manager, step):
            return self._manager.restore(step, args=arguments)["about"]

    def restore(self, step: int, state: DiLoCoState) -> DiLoCoState:
        """Reads a state.

        Args:
            step: of the checkpoint.
            state: shapes and shardings, as `jax.ShapeDtypeStruct`.

        Raises:
            ValueError: if the checkpoint has other arrays.
            ReadError: if it cannot be read.
        """
        rest = state._replace(params=())
        _check_arrays(self._manager, step, {"theta": state.params, "state": rest})
        arguments = ocp.args.Composite(
            theta=ocp.args.StandardRestore(state.params),
            state=ocp.args.StandardRestore(rest),
        )
        with _unreadable(self._manager, step):
            restored = self._manager.restore(step, args=arguments)
            return restored["state"]._replace(params=restored["theta"])


@contextlib.contextmanager
def _named(kind, what):
    """Turns errors, which may be of any kind and from other threads, into one."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise kind(f"{what}: {type(error).__name__}: {reason}") from error


def _unreadable(manager, step):
    folder = manager.directory / str(step)
    return _named(
        ReadError,
        f"the checkpoint {folder} cannot be read; remove it, to go on from the one "
        f"before it",
    )


def saved_steps(workdir: str | pathlib.Path) -> list[int]:
    """Steps of the checkpoints in `workdir`, rising; empty if there are none."""
    if not (pathlib.Path(workdir) / FOLDER).is_dir():
        return []
    with _manager(workdir, create=False) as manager:
        return sorted(manager.all_steps())


def load_params(
    workdir: str | pathlib.Path,
    step: int | Literal["latest", "best"] = "latest",
    like: PyTree | None = None,
) -> PyTree:
    """Theta of a run, for anyone: needs no configuration and no mesh.

    Args:
        workdir: folder of the run.
        step: of the checkpoint: the latest, the one of the lowest held-out loss, or one
            of `saved_steps(workdir)`.
        like: shapes and shardings, as `jax.ShapeDtypeStruct`; by default what was
            saved, as nested dicts on the first device.

    Returns:
        The parameters, theta.

    Raises:
        FileNotFoundError: if there is no such checkpoint; of the best, if no checkpoint
            was evaluated.
        ValueError: if it has other arrays than `like`.
        ReadError: if it cannot be read.
    """
    if not (pathlib.Path(workdir) / FOLDER).is_dir():
        raise FileNotFoundError(f"there are no checkpoints in workdir {workdir}")
    with _manager(workdir, create=False) as manager:
        named = {"latest": manager.latest_step, "best": manager.best_step}
        found, steps = step, sorted(manager.all_steps())
        if step in named:
            found = named[step]()
        if found not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint {step!r} in workdir {workdir}; there are "
                f"{steps}, 'latest' and 'best'"
            )
        if step == "best" and math.isinf(manager.metrics(found)["eval_loss"]):
            raise FileNotFoundError(
                f"no checkpoint in workdir {workdir} was evaluated, so none is the "
                f"best; there are {steps}"
            )
        if like is None:
            device = SingleDeviceSharding(jax.local_devices()[0])
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
                dict(_metadata(manager, found)["theta"]),
            )
        else:
            _check_arrays(manager, found, {"theta": like})
        arguments = ocp.args.Composite(theta=ocp.args.StandardRestore(like))
        with _unreadable(manager, found):
            return manager.restore(found, args=arguments)["theta"]


def _manager(workdir, **options):
    standard = ocp.StandardCheckpointHandler
    return ocp.CheckpointManager(
        pathlib.Path(workdir).absolute() / FOLDER,
        item_handlers={
            "theta": standard(),
            "state": standard(),  # All of it but theta.
            "about": ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            best_fn=_eval_loss, best_mode="min", **options
        ),
    )


def _eval_loss(metrics):
    return metrics["eval_loss"]


def _metadata(manager, step):
    with _unreadable(manager, step):
        found = manager.item_metadata(step)
        # An item whose files are gone has none.
        return {name: dict(found[name].tree) for name in ("theta", "state")}


def _check_arrays(manager, step, items):
    """Refuses other arrays than those of the checkpoint, of which orbax says less."""
    shapes = lambda item: {
        tree.name(path): tuple(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(item)
    }
    metadata = _metadata(manager, step)
    for item, like in items.items():
        saved, wanted = shapes(metadata[item]), shapes(like)
        for name in sorted(saved | wanted):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f"{item} {name} has shape {saved.get(name)} in the checkpoint of "
                    f"step {step}, and {wanted.get(name)} here"
                )
