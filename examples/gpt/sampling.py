"""A callback that lets the trained model write some text when the fit ends."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import rich
from lightning.pytorch.utilities import rank_zero_only
from rich.panel import Panel
from rich.text import Text

from gpt.data import decode, encode
from gpt.model import GPTModule


class TextSampler(L.Callback):
    """Continue a prompt when the fit ends, and print the text.

    Args:
        prompt: Text to continue.
        num_tokens: Bytes to write.
        temperature: Below 1 the likely bytes become likelier.
        context: How many last bytes the model looks at; best what it was trained on.
    """

    def __init__(
        self,
        prompt: str = "The ",
        num_tokens: int = 320,
        temperature: float = 0.6,
        context: int = 128,
    ) -> None:
        super().__init__()
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.temperature = temperature
        self.context = context
        self.text = ""  # empty until a fit has ended

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sample. Every rank takes part, because each holds a part of the parameters.

        Raises:
            ValueError: If the module cannot generate.
        """
        if not isinstance(pl_module, GPTModule):
            raise ValueError(
                f"Expected TextSampler to be used with a GPTModule, which can generate, found a "
                f"{type(pl_module).__name__}: remove the callback."
            )
        prompt = encode(self.prompt)[None].to(pl_module.device)
        with trainer.precision_plugin.forward_context():
            tokens = pl_module.generate(prompt, self.num_tokens, self.context, self.temperature)
        self.text = decode(tokens[0])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Print it, now that the progress bar has left the terminal, and keep it in the run's folder."""
        if self.text:
            self._print(Path(trainer.log_dir) if trainer.log_dir and trainer.loggers else None)

    @rank_zero_only
    def _print(self, folder: Path | None) -> None:
        text = Text.assemble((self.prompt, "bold"), self.text.removeprefix(self.prompt))
        rich.print(
            Panel(text, title="sample", title_align="left", border_style="dim", padding=(1, 2))
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "sample.txt").write_text(self.text + "\n", encoding="utf-8")
