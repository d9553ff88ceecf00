"""What is served: /v1/models and the model's own data in SGLang's shape."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.serve.context import Serving
from runtime.serve.wire import json_response


def routes(serving: Serving) -> list[BaseRoute]:
    """Model cards."""

    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(serving)]})

    async def one_model(request: Request) -> Response:
        serving.check_model(request.path_params["name"])
        return json_response(model_card(serving))

    async def model_info(request: Request) -> Response:
        return json_response(info(serving))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/model_info", model_info, methods=["GET"]),
        Route("/get_model_info", model_info, methods=["GET"]),
    ]


def model_card(serving: Serving) -> dict[str, Any]:
    """One entry of the list, with what vLLM's and SGLang's tools read from it."""
    return {
        "id": serving.served_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "ramet",
        "root": serving.spec.path,
        "parent": None,
        "max_model_len": serving.context_length,
    }


def info(serving: Serving) -> dict[str, Any]:
    """SGLang's model data. `model_path` is what clients load a tokenizer from and pick a chat template by."""
    return {
        "model_path": serving.spec.path,
        "tokenizer_path": serving.tokenizer.path,
        "served_model_name": serving.served_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_model_len": serving.context_length,
        "vocab_size": serving.spec.vocab_size,
        "eos_token_ids": list(serving.spec.eos_ids),
    }
