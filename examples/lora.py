"""Train a LoRA adapter together with the mixture keys of a converted Transformers model.

python examples/lora.py              # a tiny random Llama; pass a folder or a name of the Hub for a real model
"""

import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mgk.hf


def load() -> torch.nn.Module:
    if len(sys.argv) > 1:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


model = mgk.hf.convert(load())
# The adapter trains and stores the mixture keys too, although they are not listed here.
adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
peft = get_peft_model(model, adapter)
peft.print_trainable_parameters()
optimizer = torch.optim.AdamW((p for p in peft.parameters() if p.requires_grad), lr=1e-2)
ids = torch.randint(256, (4, 32))
for step in range(1, 21):
    loss = peft(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
with tempfile.TemporaryDirectory() as folder:
    peft.save_pretrained(folder)
    again = PeftModel.from_pretrained(mgk.hf.convert(load()), folder).eval()
with torch.no_grad():
    difference = (again(input_ids=ids).logits - peft.eval()(input_ids=ids).logits).abs().max().item()
print(f"difference after loading the adapter: {difference:.1e}")
assert difference < 1e-4
