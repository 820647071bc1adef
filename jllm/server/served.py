"""The model that is served: its names, its words and its limits, and prompts made ready for it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jllm
from jllm.chat_template import render
from jllm.server.async_engine import AsyncEngine
from jllm.server.call_formats import FORMATS, CallFormat, guess_format
from jllm.server.errors import APIError, bad_request
from jllm.server.metrics import Metrics
from jllm.server.options import ServerOptions
from jllm.server.protocol import Message, Prompt, TemplateOptions
from jllm.server.tools import messages_for_template
from jllm.structured import Structured
from jllm.tokenizer import Tokenizer

TEXT_THREADS = 4
# Options of the template that have fields of their own, or that no request may set.
RESERVED = frozenset(
    (
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "eos_token",
        "messages",
        "tools",
    )
)


class TokenPrompt(NamedTuple):
    """A prompt as it is run: its text, if it came as text, and its ids."""

    text: str | None
    ids: list[int]


class Served:
    """One engine, and what the routes need to know of its model."""

    def __init__(self, engine: jllm.Engine, options: ServerOptions) -> None:
        assert engine.config.max_model_len
        self.options = options
        self.names = options.served_model_name
        self.name = self.names[0]
        self.created = int(time.time())
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.model_config.vocab_size
        self.max_model_len = engine.config.max_model_len
        self.metrics = Metrics(self.name)
        self.engine = AsyncEngine(
            engine,
            warm_up=options.warm_up,
            step_timeout_s=options.step_timeout_s,
            max_waiting=options.max_waiting,
            metrics=self.metrics,
        )
        # Text is slow for an event loop: a prompt of 1 MB takes half a second to tokenize.
        self._threads = ThreadPoolExecutor(TEXT_THREADS, "jllm-text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def chat_template(self) -> str | None:
        if self.options.chat_template is not None:
            return self.options.chat_template
        return None if self.tokenizer is None else self.tokenizer.chat_template

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls: as the server was told, or as its template shows."""
        if self.options.tool_call_parser is not None:
            return FORMATS[self.options.tool_call_parser]
        return guess_format(self.chat_template)

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the tokenizer's special tokens."""
        if self.tokenizer is None:
            return frozenset()
        ids = sorted(self.tokenizer.special_ids)
        decode = self.tokenizer.decode
        return frozenset(decode([token], skip_special_tokens=False) for token in ids)

    async def prepare_form(self, form: Structured | None, param: str | None) -> None:
        """Compiles what a text must look like, in another thread and before the engine meets it;
        raises APIError 400 for a form that cannot be used, naming the field that asked for it."""
        if form is None:
            return
        try:
            await self._in_thread(lambda: self.engine.prepare_structured(form))
        except APIError as error:
            name = f"Structured.{form.kind}"
            raise bad_request(error.message.replace(name, param or name), param) from error

    def check_model(self, name: str | None) -> None:
        """Raises APIError 404 unless the model is served under this name; None means any."""
        if name is not None and name not in self.names:
            raise APIError(404, f"The model `{name}` does not exist.", param="model")

    async def token_prompts(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool, keep: int | None
    ) -> list[TokenPrompt]:
        """Texts tokenized; ids as they are. Of each the last ``keep`` tokens, or all.

        Raises APIError 400 for an empty prompt, an id that the model does not have, and text where
        there is no tokenizer.
        """
        ready = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = await self.encode(prompt, add_special_tokens=add_special_tokens)
                ready.append(TokenPrompt(prompt, ids))
            else:
                self.check_ids(prompt, "prompt")
                ready.append(TokenPrompt(None, prompt))
        if keep is not None:
            ready = [self._last(prompt, keep) for prompt in ready]
        if not all(prompt.ids for prompt in ready):
            raise bad_request("The prompt is empty: it must hold at least one token.", "prompt")
        return ready

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises APIError 400 for ids that the model does not have."""
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise bad_request(
                    f"{param} has token id {token}, outside the vocabulary of {self.vocab_size}.",
                    param,
                )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, in another thread; raises APIError 400 for what has none."""
        tokenizer = self._tokenizer()
        return await self._in_thread(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        tokenizer = self._tokenizer()
        return await self._in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=False))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        options: TemplateOptions,
        *,
        add_special_tokens: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, and of the tools it may use; raises APIError 400 if the
        template cannot or will not write it."""
        tokenizer, template = self._tokenizer(), self.chat_template
        if options.chat_template is not None:
            raise bad_request(
                "A request cannot bring its own chat_template; the server is started with one.",
                "chat_template",
            )
        if taken := RESERVED & options.chat_template_kwargs.keys():
            raise bad_request(
                f"chat_template_kwargs cannot set {', '.join(sorted(taken))}.",
                "chat_template_kwargs",
            )
        plain = [_plain(message, template or "") for message in messages]

        def ids() -> list[int]:
            text = render(
                template,
                messages_for_template(plain),
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tools=tools,
                **options.chat_template_kwargs,
            )
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        try:
            return await self._in_thread(ids, self.options.template_timeout_s)
        except TimeoutError:
            limit = self.options.template_timeout_s
            raise bad_request(
                f"The chat template took longer than {limit:g} s for these messages.", "messages"
            ) from None

    def _last(self, prompt: TokenPrompt, keep: int) -> TokenPrompt:
        if len(prompt.ids) <= keep:
            return prompt
        return TokenPrompt(None, prompt.ids[-keep:])  # its text is no longer the whole

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request("The model has no tokenizer; send token ids instead of text.")
        return self.tokenizer

    async def _in_thread[T](self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._threads, work), timeout_s)
        except ValueError as error:
            raise bad_request(str(error)) from error


def _plain(message: Message, template: str) -> dict[str, Any]:
    """The message for a template. Most templates know no developers, whose messages are those that
    were called system before; some would leave them out without a word."""
    plain = message.model_dump(exclude_unset=True)
    if message.role == "developer" and "developer" not in template:
        plain["role"] = "system"
    return plain
