"""README.md of the folder of a saved model, with the code that loads it."""

from __future__ import annotations

from pathlib import Path

TEXT = """---
library_name: mgk
---

# A model with attention layers of mgk

Its model type is `{model_type}`, which the package mgk registers with Transformers:

```
pip install 'mgk[hf]'   # in a clone of mgk: pip install '.[hf]'
```

```python
import mgk.hf  # registers the model type
from transformers import {auto_class}

model = {auto_class}.from_pretrained("FOLDER")  # this folder, or its name on the Hub
```

Without `import mgk.hf`, Transformers reports that it "does not recognize this architecture" and suggests an update of
Transformers, which does not help.
"""


def write_readme(folder: str | Path, model_type: str, auto_class: str) -> None:
    """Write a README.md that shows how to load the model of a folder, unless the folder has one.

    Args:
        folder: Folder of a saved model.
        model_type: Model type in its config.json.
        auto_class: Auto class that loads it.
    """
    path = Path(folder) / "README.md"
    if not path.exists():
        path.write_text(TEXT.format(model_type=model_type, auto_class=auto_class), encoding="utf-8")
