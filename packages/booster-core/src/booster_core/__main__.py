"""``python -m booster_core``: the ``booster`` command, where the folder of scripts is not on the path."""

from booster_core.cli import main

main(prog_name="booster")
