"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's words, without the model."""

from __future__ import annotations

from typing import Any

from jllm.server.errors import bad_request
from jllm.server.protocol import DetokenizeRequest, TokenizeRequest
from jllm.server.served import Served


async def tokenize(served: Served, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, or of a conversation through the chat template."""
    served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        ids = await served.chat_prompt(body.messages, body, add_special_tokens=bool(special))
    else:
        assert body.prompt is not None
        ids = await served.encode(body.prompt, add_special_tokens=special is not False)
    strings = None
    if body.return_token_strs and served.tokenizer is not None:
        strings = [served.tokenizer.token_string(token) for token in ids]
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": served.max_model_len,
        "token_strs": strings,
    }


async def detokenize(served: Served, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    served.check_model(body.model)
    served.check_ids(body.tokens, "tokens")
    return {"prompt": await served.decode(body.tokens)}


def tokenizer_info(served: Served) -> dict[str, Any]:
    """What lm-eval asks a server's tokenizer for."""
    tokenizer = served.tokenizer
    if tokenizer is None:
        raise bad_request("The model has no tokenizer.")
    return {
        "tokenizer_class": "Tokenizer",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": served.vocab_size,
        "model_max_length": served.max_model_len,
        "chat_template": served.chat_template,
    }
