"""Draw the small pictures and tones of this folder and write their records: ``python draw_data.py`` (needs pillow)."""

from __future__ import annotations

import json
import math
import random
import struct
import wave
from pathlib import Path

from PIL import Image, ImageDraw

DATA = Path(__file__).resolve().parent / "data"
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (235, 215, 50)}
SIZES = ((56, 56), (84, 56), (56, 112), (60, 90), (112, 84), (70, 64))
NOTES = {"a low tone": 220, "a middle tone": 440, "a high tone": 880}


def draw_picture(path: Path, shape: str, colour: str, size: tuple[int, int]) -> None:
    """A disc or a box of one colour on grey."""
    width, height = size
    picture = Image.new("RGB", size, (128, 128, 128))
    box = (width // 5, height // 5, 4 * width // 5, 4 * height // 5)
    draw = ImageDraw.Draw(picture)
    (draw.ellipse if shape == "disc" else draw.rectangle)(box, fill=COLOURS[colour])
    picture.save(path, optimize=True)


def write_tone(path: Path, frequency_hz: int, duration_ms: int) -> None:
    """A sine at 8 kHz, 8 bits."""
    rate = 8000
    values = [
        128 + round(90 * math.sin(2 * math.pi * frequency_hz * n / rate)) for n in range(rate * duration_ms // 1000)
    ]
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(1)
        out.setframerate(rate)
        out.writeframes(struct.pack(f"{len(values)}B", *values))


def record(question: str, answer: str, images: list[str], audios: list[str]) -> dict[str, object]:
    """One conversation in the mllm format."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images} | ({"audios": audios} if audios else {})


def main() -> None:
    """Six pictures, three tones; records with none, one and two pictures; records with a tone."""
    DATA.mkdir(exist_ok=True)
    rng = random.Random(0)
    drawn = []
    for number, size in enumerate(SIZES):
        shape, colour = rng.choice(("disc", "box")), list(COLOURS)[number % len(COLOURS)]
        draw_picture(DATA / f"picture_{number}.png", shape, colour, size)
        drawn.append((f"picture_{number}.png", f"a {colour} {shape}"))
    records = [record("<image>What is it?", f"{what}.", [name], []) for name, what in drawn]
    for (first, what), (second, other) in zip(drawn[::2], drawn[1::2], strict=True):
        records.append(record("<image>and<image>What are they?", f"{what}, {other}.", [first, second], []))
    records.append(record("Count to four.", "one two three four.", [], []))
    records.append(record("Name two colours.", "red and green.", [], []))
    (DATA / "pictures.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    tones = []
    for number, (what, frequency) in enumerate(NOTES.items()):
        name = f"tone_{number}.wav"
        write_tone(DATA / name, frequency, 160 + 80 * number)
        tones.append(record("<audio>What do you hear?", f"{what}.", [], [name]))
    tones.append(
        record("<image><audio>What is there?", f"{drawn[0][1]} and a low tone.", [drawn[0][0]], ["tone_0.wav"])
    )
    (DATA / "tones.json").write_text(json.dumps(tones, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
