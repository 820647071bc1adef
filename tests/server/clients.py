"""Reading what a server says, as clients do."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    """The JSON of an answer that must be a success."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(client: TestClient, prompt: Any, **body: Any) -> dict[str, Any]:
    return ask(client, COMPLETIONS, prompt=prompt, **body)


def chat(client: TestClient, content: Any, **body: Any) -> dict[str, Any]:
    return ask(client, CHAT, messages=[{"role": "user", "content": content}], **body)


def refused(client: TestClient, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of an answer that must be one, in OpenAI's form."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return error_of(response)


def error_of(response: Any) -> dict[str, Any]:
    answer = response.json()
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    return error


def stream(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that must be complete."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response.content)


def chunks_of(content: bytes) -> list[dict[str, Any]]:
    """The data of each event, held to the framing that strict clients expect."""
    events = content.decode().split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that chunks add up to, by index."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "finish_reason": None})
            assert whole["finish_reason"] is None, "a choice went on after its end"
            delta = part.get("delta")
            whole["text"] += part["text"] if delta is None else delta.get("content", "")
            for name in ("finish_reason", "stop_reason", "token_ids", "logprobs"):
                if part.get(name) is None:
                    continue
                if name == "token_ids":
                    whole[name] = whole.get(name, []) + part[name]
                elif name == "logprobs":
                    before = whole.setdefault(name, {key: [] for key in part[name]})
                    for key, values in part[name].items():
                        before[key] += values
                else:
                    whole[name] = part[name]
    return choices
