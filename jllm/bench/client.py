"""One streamed request to an OpenAI-compatible server, and whether it really succeeded.

A stream counts only if the status is 200, some chunk has a choice, no event is an error, every
event is JSON, and the last is ``[DONE]``. Everything else is a failure with its reason: a server
that breaks off early must not look fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

DRAIN_S = 1.0  # for what a server sends after [DONE], which should be nothing
MAX_REASON = 300  # characters of a server's answer that are kept


class StreamFailed(Exception):
    """The stream is no answer; the message says why."""


@dataclass
class Outcome:
    """What became of one request. Times are seconds since it was sent.

    Attributes:
      failure: why it failed, or None.
      ttft: until the first token.
      itl: gaps between chunks that bring tokens.
      e2e: until the last token.
      prompt_tokens, output_tokens: by the server's usage, else by count of chunks.
      counted_by: ``usage`` or ``chunks``.
      asked: output tokens asked for.
      finish_reason: as the server says.
    """

    asked: int
    failure: str | None = None
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    e2e: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = "chunks"
    finish_reason: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None of a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    asked: int,
    timeout_s: float,
    headers: dict[str, str] | None = None,
) -> Outcome:
    """Sends one request and reads its stream to the end; never raises for a bad answer."""
    import aiohttp

    outcome = Outcome(asked)
    start = time.perf_counter()
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.post(url, json=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                text = (await response.text())[:MAX_REASON]
                raise StreamFailed(f"status {response.status}: {text}")
            await _read(response.content, outcome, start)
    except StreamFailed as error:
        outcome.failure = str(error)
    except TimeoutError:
        outcome.failure = f"timeout after {timeout_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line too long
        outcome.failure = f"{type(error).__name__}: {error}"[:MAX_REASON]
    return outcome


async def _read(content: aiohttp.StreamReader, outcome: Outcome, start: float) -> None:
    """Takes a stream's chunks; raises StreamFailed unless it is complete."""
    last: float | None = None
    chunks, choices_seen, done = 0, False, False
    async for kind, data in events(content):  # line by line
        now = time.perf_counter() - start
        if data == "[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            raise StreamFailed(f"an event is not JSON: {data[:MAX_REASON]}") from None
        if kind == "error" or not isinstance(chunk, dict) or chunk.get("error"):
            raise StreamFailed(f"an error event: {data[:MAX_REASON]}")
        if usage := chunk.get("usage"):
            outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            outcome.output_tokens = int(usage.get("completion_tokens") or 0)
            outcome.counted_by = "usage"
        for choice in chunk.get("choices") or ():
            choices_seen = True
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        if not _brings_tokens(chunk, first=last is None):
            continue
        chunks += 1
        if last is None:
            outcome.ttft = now
        else:
            outcome.itl.append(now - last)
        last = outcome.e2e = now
    if not done:
        raise StreamFailed("the stream ended without [DONE]")
    with contextlib.suppress(TimeoutError):  # to its end, so that the connection is used again
        await asyncio.wait_for(content.read(), DRAIN_S)
    if not choices_seen or last is None:
        raise StreamFailed("no chunk had a choice with a token")
    if outcome.counted_by == "chunks":
        outcome.output_tokens = chunks


def _brings_tokens(chunk: dict[str, Any], first: bool) -> bool:
    """Whether a chunk brings tokens. A token's text may be empty (half of a character); a chat's
    opening chunk with only a role, and a closing one with only a finish_reason, bring none."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta")
        if delta is not None:  # chat
            thoughts = delta.get("reasoning_content") or delta.get("reasoning")
            if delta.get("content") or delta.get("tool_calls") or thoughts:
                return True
            if "role" in delta:
                continue
        elif choice.get("text"):
            return True
        if choice.get("finish_reason") is None or first:
            return True
    return False


async def events(content: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, str]]:
    """(event name, data) of a stream of server-sent events, read line by line.

    As the HTML standard says: an event ends at a blank line, its data lines are joined by line
    feeds, lines that begin with a colon are comments. One that the stream breaks off is dropped.
    """
    name, data = "message", list[str]()
    async for raw in content:
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "message", []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif line.startswith("event:"):
            name = line[6:].strip()
