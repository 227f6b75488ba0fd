"""Images in OpenAI's messages: parts of type `image_url` whose URL contains the image; the server fetches nothing.

Source of the form: OpenAI's API reference, "Create chat completion", and RFC 2397 for `data:` URLs.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from llmconv.serve.api_errors import ApiError

DATA = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)

DETAILS = ("auto", "low", "high")
"""Values of `detail`, which has no effect: the model's processor decides."""


def image_of(part: dict[str, Any], where: str) -> bytes:
    """The bytes of the image file in a part of type `image_url`.

    Args:
        part: the part.
        where: its place in the request.

    Raises:
        ApiError: there is no `data:` URL of an image.
    """
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not isinstance(given, dict) or given.get("detail", "auto") not in DETAILS:
        raise ApiError(f"`{where}.image_url` must be an object with a `url`", parameter=where)
    start = DATA.match(url)
    if not start:
        raise ApiError(
            f"`{where}.image_url.url` must be a URL that begins with `data:image/png;base64,` or the like: this server "
            "fetches no images",
            parameter=where,
        )
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(f"`{where}.image_url.url` is not valid base64", parameter=where) from None
