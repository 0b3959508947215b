"""A trainer that trains nothing: takes batches as any Atropos trainer does, and checks them.

    python examples/trainer_client.py --url http://127.0.0.1:8000 --batches 2 --batch-size 32

The protocol is Atropos', unchanged: register, ask GET /batch until it answers null, train on what
came, ask again. A new trainer is better off with `rollstream.client.TrainerClient`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request


def call(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_until_up(url: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            call(f"{url}/")
            return
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"--url = {url}: no trainer API there within {wait_s:g} s ({error})")
            time.sleep(0.2)


def get_round(url: str, deadline: float) -> list[list[dict]]:
    """All batches until the API says null; waits where there is none yet."""
    batches: list[list[dict]] = []
    while True:
        answer = call(f"{url}/batch")
        if answer.get("status") == "error":
            sys.exit(answer["message"])
        if answer["batch"] is not None:
            batches.append(answer["batch"])
        elif batches or answer.get("done"):
            return batches
        elif time.monotonic() > deadline:
            sys.exit("no batch came in time")
        else:
            time.sleep(0.5)


def check(batch: list[dict], batch_size: int) -> None:
    """What a trainer relies on: sizes, and arrays that lie on top of each other."""
    assert sum(len(group["scores"]) for group in batch) == batch_size
    for group in batch:
        for tokens, mask, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        ):
            assert len(tokens) == len(mask) == len(logprobs)
            for token, label, logprob in zip(tokens, mask, logprobs, strict=True):
                assert (label, logprob) == (-100, 1.0) if label != token else logprob <= 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description="Take batches as an Atropos trainer does.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--batches", type=int, default=2, help="stop after this many")
    parser.add_argument("--batch-size", type=int, default=32, help="samples, as the run has it")
    parser.add_argument("--wait-s", type=float, default=600, help="for the API and for each round")
    given = parser.parse_args()
    wait_until_up(given.url, given.wait_s)
    call(f"{given.url}/register", {
        "wandb_group": "", "wandb_project": "", "batch_size": given.batch_size,
        "max_token_len": 2048, "checkpoint_dir": "", "save_checkpoint_interval": 0,
        "starting_step": 0, "num_steps": given.batches,
    })
    taken = 0
    while taken < given.batches:
        round_ = get_round(given.url, time.monotonic() + given.wait_s)
        if not round_:
            break
        for batch in round_:
            check(batch, given.batch_size)
            scores = [score for group in batch for score in group["scores"]]
            sampled = sum(label != -100 for g in batch for mask in g["masks"] for label in mask)
            print(f"batch {taken}: {len(batch)} groups, {len(scores)} samples, mean score "
                  f"{sum(scores) / len(scores):.3f}, {sampled} sampled tokens", flush=True)
            taken += 1
    print(f"done: {taken} batches")


if __name__ == "__main__":
    main()
