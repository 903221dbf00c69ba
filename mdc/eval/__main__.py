"""What torchrun starts, once per rank of the stage `extract`: see `mdc.eval.features`."""

import argparse
import signal
import sys
from pathlib import Path

from mdc.processes import end_with_parent, on_ctrl_c, raise_on_sigterm


def main() -> None:
    end_with_parent()
    on_ctrl_c(signal.SIG_DFL)  # at once and without a traceback, as long as there is nothing to put in order
    parser = argparse.ArgumentParser(prog="python -m mdc.eval", description=__doc__)
    parser.add_argument("--params", type=Path, required=True, help="the parameter file")
    parser.add_argument("--shards", type=Path, required=True, help="the folder that stage `shard` made")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint folder")
    parser.add_argument("--cache", type=Path, required=True, help="where sets of features are kept")
    parser.add_argument("--failure", type=Path, required=True, help="where to leave the first failure")
    arguments = parser.parse_args()

    from mdc import dist
    from mdc.config import load_params
    from mdc.errors import Terminated
    from mdc.eval.features import Extraction
    from mdc.ranks import failures_recorded

    params = load_params(arguments.params)
    group = dist.process_group(dist.pick_device(params.compute.device), params.compute.rank_timeout)
    try:
        with group, raise_on_sigterm(), failures_recorded(arguments.failure, launched=True):
            on_ctrl_c(signal.default_int_handler)
            Extraction(params, arguments.shards, arguments.model, arguments.cache).make()
    except (KeyboardInterrupt, Terminated) as stop:
        sys.exit(130 if isinstance(stop, KeyboardInterrupt) else 143)


if __name__ == "__main__":
    main()
