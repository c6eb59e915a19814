"""Train a character model with mixture keys and let it continue a prompt.

python examples/char_model.py --text essay.txt --steps 1000
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import mgk


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = mgk.Attention(width, heads, num_kv_heads=heads // 2, is_causal=True, rotary=10000.0)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class CharacterModel(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, default=Path(__file__), help="training text; default: this file")
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
text = arguments.text.read_text(encoding="utf-8")
characters = sorted(set(text))
ids = torch.tensor([characters.index(character) for character in text], device=device)
model = CharacterModel(len(characters)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
length = min(128, len(ids) - 2)
for step in range(1, arguments.steps + 1):
    starts = torch.randint(len(ids) - length - 1, (8,)).tolist()
    batch = torch.stack([ids[start : start + length + 1] for start in starts])
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == arguments.steps:
        print(f"step {step}: loss {loss.item():.3f}")
tokens = ids[:20]
for _ in range(80):
    tokens = torch.cat([tokens, model(tokens[None])[0, -1:].argmax(-1)])
print("".join(characters[token] for token in tokens.tolist()))
