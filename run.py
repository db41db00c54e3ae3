"""Trains a language model with MuLoCo or a relative of it.

    python run.py [--config=FILE[:ARGUMENT]] [--config.KEY=VALUE ...] [--workdir=DIR]

Without --config it runs configs/tiny.py; configs/default.py lists all keys with their
meaning. Without --workdir it makes runs/<config>-<time>. In a workdir that holds a run
already it goes on with that; --config may then be left out.

    --dry_run     print what the run would take, without its data or its model, and stop
    --eval_only   evaluate the latest checkpoint of --workdir, and stop
    --profile=N   write a JAX profile of round N to the workdir

On several hosts, start it on each of them with --distributed. Where JAX cannot find the
others by itself (it can on TPU pods, under Slurm, Open MPI and Kubernetes), add
--coordinator=HOST:PORT --num_processes=N --process_id=I.
"""

import json
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

TINY = pathlib.Path(__file__).resolve().parent / "configs" / "tiny.py"


class Arguments(NamedTuple):
    """What the command line says; `hosts` is for `jax.distributed.initialize`."""

    config: ConfigDict
    workdir: str
    mode: str
    profile: int
    hosts: dict[str, Any] | None


def parse(argv: list[str]) -> Arguments:
    """Reads the command line.

    Raises:
        ValueError: if it makes no sense.
    """
    try:
        workdir = flags.DEFINE_string("workdir", None, "Folder of the run.")
        dry_run = flags.DEFINE_bool("dry_run", False, "Only say what it would take.")
        eval_only = flags.DEFINE_bool("eval_only", False, "Only evaluate.")
        profile = flags.DEFINE_integer(
            "profile", 0, "Round to write a profile of.", lower_bound=0
        )
        distributed = flags.DEFINE_bool("distributed", False, "Join other hosts.")
        coordinator = flags.DEFINE_string(
            "coordinator", None, "HOST:PORT of process 0."
        )
        num_processes = flags.DEFINE_integer("num_processes", None, "Of all hosts.")
        process_id = flags.DEFINE_integer("process_id", None, "Of this one, from 0.")
        flags.FLAGS(argv, known_only=True)
        config, file = _define_config(argv, workdir.value)
        unused = flags.FLAGS(argv)[1:]
        if not file:
            file = config_flags.get_config_filename(flags.FLAGS["config"])  # type: ignore[arg-type]
    except Exception as error:
        raise ValueError(_reason(error)) from None
    if not isinstance(config.value, ConfigDict):
        missing = (
            "there is no" if not pathlib.Path(file).exists() else "no ConfigDict in"
        )
        raise ValueError(f"{missing} config file {file}")
    if unused:
        raise ValueError(
            f"unexpected argument {unused[0]!r}; keys are --config.KEY=VALUE"
        )
    hosts = {
        "coordinator_address": coordinator.value,
        "num_processes": num_processes.value,
        "process_id": process_id.value,
    }
    given = [
        f"--{name.removesuffix('_address')}"
        for name, value in hosts.items()
        if value is not None
    ]
    if not distributed.value and given:
        raise ValueError(f"{', '.join(given)} without --distributed has no effect")
    if workdir.value == "":
        raise ValueError("--workdir is empty; name a folder, or leave it out")
    if distributed.value and not (workdir.value or dry_run.value):
        raise ValueError("--distributed needs a --workdir that all hosts share")
    if dry_run.value and eval_only.value:
        raise ValueError("--dry_run and --eval_only exclude one another")
    if (dry_run.value or eval_only.value) and profile.value:
        raise ValueError(f"--profile={profile.value} needs a run that trains")
    if eval_only.value and not workdir.value:
        raise ValueError("--eval_only needs the --workdir of a run")
    name = f"{pathlib.Path(file).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    modes = {"dry_run": dry_run.value, "eval_only": eval_only.value, "train": True}
    return Arguments(
        config.value,
        workdir.value or f"runs/{name}",
        next(mode for mode, chosen in modes.items() if chosen),
        profile.value,
        hosts if distributed.value else None,
    )


def _define_config(argv, workdir):
    """The flag --config, and the file that stands for it if none is given.

    That is what the run in `workdir` was begun with; without one it is the demo. The
    definition reads the command line by itself, so it can already fail: with several
    kinds of error for a key, and any for a file, which is a program.
    """
    given = any(re.match("--?config(=|$)", argument) for argument in argv)
    stored = pathlib.Path(workdir or ".", "config.json")
    if given or not workdir or not stored.is_file():
        flag = config_flags.DEFINE_config_file("config", str(TINY), lock_config=True)
        return flag, ""
    try:
        settings: Any = _tuples(json.loads(stored.read_text(encoding="utf-8")))
        config = ConfigDict(settings)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"{stored} holds no settings; remove it, or give a --config"
        ) from None
    return config_flags.DEFINE_config_dict("config", config, lock_config=True), stored


def _tuples(value):
    """JSON has lists for tuples."""
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main(argv: list[str]) -> int:
    """Runs, and reports errors that the user can mend in one line."""
    if {"-h", "--help", "--helpfull"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        arguments = parse(argv)
        import jax  # Late, so that a mistyped key is answered at once.

        from muloco_jax import budget, experiment, metrics, train, workdirs

        if arguments.hosts is not None:
            jax.distributed.initialize(**arguments.hosts)
        config, workdir = arguments.config, arguments.workdir
        if arguments.mode == "dry_run":
            lines = budget.describe(experiment.plan(config))
            if jax.process_index() == 0:
                print(*lines, sep="\n")
            return 0
        built = experiment.build(config)
        if arguments.mode == "eval_only":
            measured = train.evaluate(config, built, workdir)
            if jax.process_index() == 0:
                print(train.evaluation_text(measured))
            return 0
    except (ValueError, OSError) as error:
        return _fail(error)
    except AttributeError as error:
        if not isinstance(error.args[0], KeyError):  # Of a key that a file lacks.
            raise
        return _fail(_reason(error))
    try:
        train.train(config, built, workdir, profile=arguments.profile)
    except (workdirs.RefusedError, metrics.DivergedError, OSError) as error:
        return _fail(error)
    return 0


def _reason(error):
    """Why a configuration could not be read, in one line."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]  # ml_collections wraps errors of keys, some twice.
    text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
    if isinstance(error, flags.Error):  # Its last line is the reason.
        return text.splitlines()[-1]
    if hint := re.search(r'Did you mean "(.*)" instead of "(.*)"', text):
        return f"unknown key {hint[2]!r}; did you mean {hint[1]!r}?"
    if isinstance(error, KeyError):
        return f"no key {text}; configs/default.py lists all"
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def _fail(error):
    print("run.py:", " ".join(str(error).split()), file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:
        print("run.py: interrupted", file=sys.stderr)
        sys.exit(130)
