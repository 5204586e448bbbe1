"""The vocabulary's entries with the form of parts of a whole, which all tests of it share."""

from __future__ import annotations

from flashgen.forms.mesh import Mesh
from support.variants import lowered
from support.vocabulary import VOCABULARY

FORMS = ("dense", "mesh")
SPECS = {name: entry.spec("float32", forms=FORMS) for name, entry in VOCABULARY.items()}
#: The names of those that can have the form.
SERVED = [name for name, spec in SPECS.items() if not Mesh().why_not(lowered(spec))]
