"""Decode token by token with a cache, check it against one full forward, and compare the sizes of caches.

python examples/decode.py
"""

import torch

import mgk

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(2, 40, 256, device=device)  # [batch, length, width]

layers = {
    "softmax, 8 heads": mgk.Attention(256, 8, variant="softmax", is_causal=True),
    "sMGK, 8 heads, 4 key heads": mgk.Attention(256, 8, num_kv_heads=4, is_causal=True),
    "MGK, 8 heads, 4 key heads": mgk.Attention(256, 8, num_kv_heads=4, variant="mgk", is_causal=True),
    "sMLK, 4 heads": mgk.Attention(256, 4, variant="smlk", is_causal=True),
}
for name, layer in layers.items():
    layer = layer.to(device).eval()
    with torch.no_grad():
        cache = layer.make_cache(batch_size=2, max_length=1024)
        parts = [layer(x[:, :30], cache=cache)]  # the prompt in one call
        parts += [layer(x[:, n : n + 1], cache=cache) for n in range(30, 40)]  # then one token at a time
        difference = (torch.cat(parts, 1) - layer(x)).abs().max().item()
        cache.reorder(torch.tensor([1, 0]))  # beam search: exchange the two sequences
        cache.reset()  # ready for the next prompt
    print(f"{name:28} cache {cache.nbytes / 1e6:5.2f} MB for 1,024 tokens, difference {difference:.1e}")
    assert difference < 1e-4
