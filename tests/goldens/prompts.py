"""The texts that the demo model's goldens are made from."""

from __future__ import annotations

TEXTS: dict[str, str] = {
    "one_token": "The",
    "story": (
        "Once upon a time, in a small village by the sea, there lived an old clockmaker who could "
        "not sleep. Every night she wound the town clock, and every morning it was an hour late. "
        "One winter evening a boy knocked at her door and said,"
    ),
    "code": (
        "def quicksort(items: list[int]) -> list[int]:\n"
        '    """Return a sorted copy of items."""\n'
        "    if len(items) <= 1:\n"
        "        return items\n"
        "    pivot = items[0]\n"
        "    smaller = [x for x in items[1:] if x < pivot]\n"
    ),
    "digits": "3.14159265358979 1,000,000 2024-12-31T23:59:59 +1-800-555-0199 0xDEADBEEF 17*23=",
    "json": (
        '{"id": 42, "name": "Ada Lovelace", "tags": ["math", "poetry"], "address": '
        '{"city": "London", "postcode": null}, "active": true, "scores": [1.5, 2.25, -3e8], "next":'
    ),
    "chinese": "北京是中华人民共和国的首都，也是一座有三千多年历史的城市。春天的时候，",
    "arabic": "اللغة العربية من أكثر اللغات انتشارا في العالم، ويتحدث بها أكثر من",
    "hindi": "भारत एक विशाल देश है जहाँ अनेक भाषाएँ बोली जाती हैं। हिन्दी",
    "russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья",
    "japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "emoji": "🙂👍🏽 👩‍👩‍👧‍👦 🇫🇷🎉🚀 I ❤️ this! naïve café — “quotes” … ½ ≠ ∞ 🤖",
    "repetition": "The quick brown fox jumps over the lazy dog. " * 60,
    "question": "Question: What is the capital of France?\nAnswer:",
    "markdown": (
        "# Recipe: Bread\n\n## Ingredients\n\n| item | amount |\n|---|---|\n| flour | 500 g |\n"
        "| water | 350 ml |\n\n## Steps\n\n1. **Mix** the flour and the water.\n2. "
    ),
    "spaces": "a\n\n\n\tb  c    d\r\n\r\n \u00a0e\u3000f ",
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat": [{"role": "user", "content": "Explain in one sentence why the sky is blue."}],
    "chat_turns": [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "Arr, it be 4, matey!"},
        {"role": "user", "content": "And what is the largest planet?"},
    ],
}
