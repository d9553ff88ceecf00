"""transformers as a worker in its own environment: a JSON list of prompts a line in, times and texts a line out.

    python -P bench/peer_transformers.py FOLDER DTYPE THREADS

Runs with transformers' environment, so it imports nothing of Ramet. Several prompts go as one padded batch.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Clock:
    """A streamer that keeps when each token came."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.time())

    def end(self):
        pass


def main():
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        inputs, clock, n = tokenizer(asked["prompts"], return_tensors="pt", padding=True), Clock(), asked["max_tokens"]
        alone = len(asked["prompts"]) == 1
        with torch.inference_mode():
            out = model.generate(
                **inputs, max_new_tokens=n, min_new_tokens=n, do_sample=False, streamer=clock if alone else None
            )
        n_in = inputs["input_ids"].shape[1]
        texts = tokenizer.batch_decode(out[:, n_in:], skip_special_tokens=True)
        times = clock.times[1:] if alone else [time.time()]  # the streamer is first given the prompt
        print(json.dumps({"texts": texts, "times": times, "prompt_tokens": n_in, "tokens": n}), flush=True)


if __name__ == "__main__":
    main()
