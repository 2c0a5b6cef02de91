"""POST /v1/completions."""

from __future__ import annotations

import uuid

from ktopt.engine.request import Request
from ktopt.server.answering import WaitingResponse
from ktopt.server.protocol.completions import CompletionRequest
from ktopt.server.service import Service
from ktopt.server.writing.completions import CompletionWriter

DEFAULT_TOKENS = 16
"""OpenAI's."""


async def complete(service: Service, request: CompletionRequest, client: str) -> WaitingResponse:
    """Continue one or several texts. ApiError where that can't be done."""
    service.check_model(request.model)
    request.check()
    n = request.n or 1
    prompts = request.prompts
    service.check_choices(n * len(prompts))
    tokens = [await service.prompts.of_text(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    id = uuid.uuid4().hex
    sampling = service.sampling(request, request.logprobs)
    requests = [
        Request(
            prompt_ids=tuple(prompt_ids),
            max_tokens=service.max_tokens(len(prompt_ids), request.max_tokens, "max_tokens", DEFAULT_TOKENS),
            sampling=sampling,
            n=n,
            stop=request.stops,
            ignore_eos=bool(request.ignore_eos),
            client=client,
            id=id if len(prompts) == 1 else f"{id}-{place}",
        )
        for place, prompt_ids in enumerate(tokens)
    ]
    echoed = []
    if request.echo:
        echoed = [prompt if isinstance(prompt, str) else await service.prompts.text_of(prompt) for prompt in prompts]
    writer = CompletionWriter(
        service.head("text_completion", f"cmpl-{id}", request),
        len(prompts),
        n,
        service.bytes_of,
        logprobs=request.logprobs is not None,
        echoed=echoed,
    )
    return await service.answer(requests, writer, {"context_length_exceeded": "prompt"}, bool(request.stream))
