"""Print the script by which a shell completes the verbs and options of ``booster``.

Bash reads it in ``~/.bashrc`` as ``eval "$(booster completion bash)"``, zsh in ``~/.zshrc`` alike; fish from the file
``~/.config/fish/completions/booster.fish``.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script by which a shell completes the verbs and options of booster.

    Add `eval "$(booster completion bash)"` to ~/.bashrc, or the same with zsh to ~/.zshrc. For fish, run
    `booster completion fish > ~/.config/fish/completions/booster.fish`.
    """
    script = get_completion_class(shell)
    assert script is not None, "click completes each of the shells"
    click.echo(script(click.get_current_context().find_root().command, {}, "booster", "_BOOSTER_COMPLETE").source())
