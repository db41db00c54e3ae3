"""Trains a language model with MuLoCo or a relative of it.

    python run.py [--config=FILE[:ARGUMENT]] [--config.KEY=VALUE ...] [--workdir=DIR]

Without --config it runs configs/tiny.py; configs/default.py lists all keys with their
meaning. Without --workdir it makes runs/<config>-<time>. On several hosts, start it on
each of them with --distributed.
"""

import pathlib
import sys
import time

from absl import flags
from ml_collections import ConfigDict, config_flags

TINY = pathlib.Path(__file__).resolve().parent / "configs" / "tiny.py"


def parse(argv: list[str]) -> tuple[ConfigDict, str, bool]:
    """The configuration, the folder of the run, and whether there are other hosts.

    Raises:
        ValueError: if the command line makes no sense.
    """
    try:
        # This reads the command line itself, so it can already fail.
        holder = config_flags.DEFINE_config_file("config", str(TINY), lock_config=True)
        workdir = flags.DEFINE_string("workdir", "", "Folder of the run.")
        distributed = flags.DEFINE_bool("distributed", False, "Join other hosts.")
        unused = flags.FLAGS(argv)[1:]
        config = holder.value
        file = config_flags.get_config_filename(flags.FLAGS["config"])  # type: ignore[arg-type]
        if not isinstance(config, ConfigDict):
            raise ValueError(f"there is no config file {file}")
    except AttributeError as error:  # Of a key; ml_collections wraps it twice.
        inner = error.args[0]
        reason = inner.args[0] if isinstance(inner, Exception) else inner
        raise ValueError(f"unknown key --config.{_one_line(reason)}") from None
    except (flags.Error, OSError) as error:  # Its last line is the reason.
        raise ValueError(str(error).splitlines()[-1]) from None
    if unused:
        raise ValueError(
            f"unexpected argument {unused[0]!r}; keys are --config.KEY=VALUE"
        )
    started = time.strftime("%Y%m%d-%H%M%S")
    return (
        config,
        workdir.value or f"runs/{pathlib.Path(file).stem}-{started}",
        distributed.value,
    )


def main(argv: list[str]) -> int:
    """Runs, and answers what the user can mend in one line."""
    if "--help" in argv[1:]:
        print(__doc__)
        return 0
    try:
        config, workdir, distributed = parse(argv)
        import jax  # Late, so that a mistyped key is answered at once.

        from muloco_jax import experiment, metrics, train

        if distributed:
            jax.distributed.initialize()
        built = experiment.build(config)
    except (ValueError, OSError) as error:
        return _fail(error)
    try:
        train.train(config, built, workdir)
    except (metrics.DivergedError, OSError) as error:
        return _fail(error)
    return 0


def _fail(error):
    print(f"run.py: {_one_line(error)}", file=sys.stderr)
    return 1


def _one_line(error):
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main(sys.argv))
