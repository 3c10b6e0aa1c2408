"""Write a Qwen3 of four layers with random weights, a tokenizer of bytes, and talks of one length, for trainers that shard with FSDP2.

python tiny_trainers.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers
from tiny_native import PLAIN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder):
    """Write model and tokenizer."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    numbers = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(7)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**PLAIN, **numbers)).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)


def write_data(folder):
    """Write the talks in the form of each trainer."""
    words = random.Random(0)

    def text(length):
        inside = "".join(words.choice("abcdefgh ") for _ in range(length - 2))
        return f"a{inside}a"  # templates strip spaces

    pairs = [(text(24), text(31)) for _ in range(64)]
    talks = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    ]
    write_lines(folder / "talks.jsonl", talks)
    try:
        import pandas
    except ImportError:
        pass  # verl's interpreter has it, and verl alone reads parquet
    else:
        pandas.DataFrame(talks).to_parquet(folder / "talks.parquet")
    squad = [{"context": question, "question": "a", "answers": {"text": [answer]}} for question, answer in pairs]
    (folder / "squad").mkdir()
    for split, rows in (("train", squad), ("validation", squad[:8])):
        write_lines(folder / "squad" / f"{split}.jsonl", rows)
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    (folder / "dataset_info.json").write_text(json.dumps({"alpaca_full": {"file_name": "alpaca.json"}}))


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_model(target / "model")
    write_data(target)
