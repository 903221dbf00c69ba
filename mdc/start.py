"""Where the command `mdc` begins: Ctrl-C is quiet from here on, while the command line itself is still being loaded."""

from mdc.processes import end_on_ctrl_c


def main() -> None:
    end_on_ctrl_c()
    from mdc.cli import main as run

    run()


if __name__ == "__main__":
    main()
