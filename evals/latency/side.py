"""Side: one of our own contenders, drafters under fixed or adaptive control."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.config import Control, EngineConfig
from specdec.drafting import check_drafters
from specdec.errors import UsageError

OURS = "specdec, "
_FIXED, _ADAPTIVE = "@fixed", "@adaptive"


@dataclass(frozen=True)
class Side:
    """Drafters as `--drafter` takes them. Control is adaptive but for a name that ends in @fixed.

    `DEFAULT` is what an engine does by itself.

    Example: `Side.parse("ngram@fixed").name == "specdec, ngram"`.
    """

    drafter: str
    control: Control

    @classmethod
    def parse(cls, text: str) -> Side:
        """Raises UsageError for drafters that there are not."""
        side = cls(text.removesuffix(_FIXED).removesuffix(_ADAPTIVE), "adaptive")
        if text.endswith(_FIXED):
            side = replace(side, control="fixed")
        if "none" in side.drafter.split(","):
            raise UsageError("plain decoding is always measured: leave out --drafter none")
        check_drafters(side.drafter)
        return side

    @property
    def name(self) -> str:
        """The contender's name in reports."""
        if self == PLAIN:
            return f"{OURS}no drafts"
        if self == DEFAULT:
            return f"{OURS}defaults"
        return f"{OURS}{self.drafter}{', adaptive' * (self.control == 'adaptive')}"

    def config(self, config: EngineConfig) -> EngineConfig:
        """The engine's; a prefix hit would make later rounds cheaper than the first."""
        return replace(config, drafter=self.drafter, control=self.control, prefix_cache=False)


PLAIN = Side("none", "fixed")
DEFAULT = Side(EngineConfig().drafter, EngineConfig().control)
STANDARD = (DEFAULT, Side("ngram", "fixed"))
