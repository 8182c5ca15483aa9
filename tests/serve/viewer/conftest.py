"""A viewer that listens, and a real browser that looks at it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import ALARM, RECIPE, make_run, write_spans

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@contextmanager
def listening(*roots: Path) -> Iterator[str]:
    """A viewer of some folders on a port of its own; gives its address."""
    import uvicorn

    from strop.serve.viewer.app import build

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    settings = uvicorn.Config(build(roots, hosts=["127.0.0.1"]), log_level="error", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright. Of one module only: while it is open there is a running event loop in
    this thread, in which no test of another module could start its own."""
    if CHROMIUM is None:
        pytest.skip("NO BROWSER: the pages of the viewer were NOT tested; install one with `apt-get install chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, as in a container, Chromium has no sandbox of its own.
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Any]]:
    """`look(*roots, width=1280, scheme="light")`: a page of a viewer of its own. Whatever a page writes to its console,
    errors of scripts and refusals of its policy, fails the test at its end; put what has to be there into
    `page.expected`."""
    with ExitStack() as stack:
        pages = []

        def make(*roots: Path, width: int = 1280, scheme: str = "light") -> Any:
            address = stack.enter_context(listening(*roots))
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, base_url=address
            )
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(60_000)
            page.expected, page.told, page.asked = (), [], []
            page.on("console", lambda message: page.told.append(message.text))
            page.on("pageerror", lambda error: page.told.append(str(error)))
            page.on("request", lambda request: page.asked.append(request.url))
            pages.append((page, address))
            return page

        yield make
        for page, address in pages:
            told = [text for text in page.told if not any(part in text for part in page.expected)]
            assert told == []
            assert [url for url in page.asked if not url.startswith(address)] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs that differ in one key; the first has an alarm, episodes, and spans of its last step."""
    folder = tmp_path / "runs"
    write_spans(make_run(folder, "one", steps=6, episodes=[1, 2, 3], update={"alarms": [ALARM]}), 6)
    make_run(folder, "two", steps=4, recipe=RECIPE % "3.0e-4")
    return folder
