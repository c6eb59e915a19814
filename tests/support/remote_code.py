"""A Transformers model whose configuration names Python code of its folder."""

import json
from pathlib import Path

CODE = """
from pathlib import Path

from transformers import BertConfig, BertModel

Path(MARKER).touch()


class RemoteConfig(BertConfig):
    model_type = "remote"


class RemoteModel(BertModel):
    config_class = RemoteConfig
"""


def make_repository(folder: Path, **settings) -> Path:
    """Write the model to `folder`; return the path of a file that exists once the code has run."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, vocab_size=64, max_position_embeddings=32)
    transformers.BertModel(config).save_pretrained(folder)
    marker = folder.parent / f"{folder.name}-code-has-run"
    (folder / "remote.py").write_text(CODE.replace("MARKER", repr(str(marker))))
    auto_map = {"AutoConfig": "remote.RemoteConfig", "AutoModel": "remote.RemoteModel"}
    saved = json.loads((folder / "config.json").read_text())
    saved |= {"model_type": "remote", "architectures": ["RemoteModel"], "auto_map": auto_map, **settings}
    (folder / "config.json").write_text(json.dumps(saved))
    return marker
