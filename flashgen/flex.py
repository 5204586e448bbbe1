"""FlexAttention with one import changed: ``from flashgen.flex import flex_attention``."""

from flashgen.integrations.flex import Prepared, flex_attention, prepare

__all__ = ["Prepared", "flex_attention", "prepare"]
