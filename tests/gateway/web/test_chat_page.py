"""The chat page in a browser, driven like a user."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages.browser import CHROMIUM, DESKTOP, PHONE, WHY_NOT, Browser, PageError
from pages.chat_model import HOSTILE, LONG_WORDS, WRITTEN, ChatModel
from systems.eventually import wait_until
from systems.served_gateway import served_gateway

pytestmark = [pytest.mark.extended, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]

LAST = ".message:last-child"
NO_ANSWER = "[aria-busy=true]"
BAD = "script,img,iframe,form,input,style,svg,math,details,[style],[id],[onerror],[onload]"
# the content security policy has refused something
POLICY = re.compile("Content Security Policy|Trusted")
STORED = """new Promise((resolve, reject) => {
  const opening = indexedDB.open("pdserve /");
  opening.onerror = () => reject(opening.error);
  opening.onsuccess = () => {
    const found = opening.result.transaction("conversations").objectStore("conversations").getAll();
    found.onsuccess = () => {
      opening.result.close();
      resolve(found.result[0].messages);
    };
  };
})"""  # the messages stored in the browser so far
KEPT = f"{STORED}.then((messages) => messages.at(-1).content.length)"
CANCELLED = """fetch("fleet/state").then((answer) => answer.json()).then(
  (state) => state.ended.filter((one) => one.finish === "CANCELLED").length)"""
ATTACKS = [  # besides HOSTILE; each has the word "end"
    '<ol start="javascript:window.hacked=20" onclick="window.hacked=21"><li>end</li></ol>',
    '<p align="&quot; onclick=&quot;window.hacked=22" data-other="x" class="error">end</p>',
    '<pre data-lang="&quot;><img src=x onerror=window.hacked=23>"><img src=x>end</pre>',
    '```html\n<img src=x onerror="window.hacked=24">end\n```',
    '```js"onfocus=window.hacked=25\nend\n```',
    r"$\href{javascript:window.hacked=26}{end}$",
    r"end $\url{https://tracker.invalid}$ $\includegraphics{https://tracker.invalid/p.png}$",
    r"end $\htmlStyle{position:fixed}{x} \htmlId{prompt}{x} \htmlData{onclick=1}{x}$",
    r"end $$\text{<img src=x onerror=window.hacked=27>}$$",
    r"end $\def\a{\a\a}\a$",
    r"end $\rule{99999em}{99999em}$",
    '<span data-math="block" data-tex="\\href{javascript:window.hacked=28}{end}">x</span>',
    'end <math><annotation-xml encoding="text/html"><img src=x onerror=window.hacked=29></math>',
    '<a href="https://example.org" target="_self" ping="https://tracker.invalid">end</a>',
    "end [x](//tracker.invalid) [x](/fleet) [x](vbscript:x) [x]( javascript:window.hacked=30)",
    '<a href="java&#10;script:window.hacked=31" background="https://tracker.invalid">end</a>',
]
# what an answer may have, other than in drawn formulas and the heads of code blocks
TAGS = (
    "a b blockquote br code del div em h1 h2 h3 h4 h5 h6 hr i kbd li ol p pre s span strong sub sup"
)
TABLE_TAGS = "table tbody td th thead tr ul"
ATTRIBUTES = (
    "align aria-label class data-lang data-math data-tex href rel role start tabindex target"
)
LOADED = """Promise.all(
  ["highlight.min.js", "katex.min.js"].map((library) => import(`/web/${library}`))
).then(() => new Promise((resolve) => setTimeout(resolve)))"""
DRAWN = """async (text) => {
  const { rendered } = await import("/web/markdown.js");
  const place = document.querySelector("#messages");
  place.className = "markdown";
  const draw = () => place.replaceChildren(rendered(text, draw));
  draw();
  await (LOADED);
}""".replace("LOADED", LOADED)  # draw Markdown, once more when its libraries are there
OFFLINE = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with served_gateway(ChatModel) as url:
        yield url


@pytest.fixture
def page(gateway: str, browser: Browser) -> Iterator[Browser]:
    """Open the chat page with empty storage."""
    browser.open("about:blank")
    browser.call("Storage.clearDataForOrigin", origin=gateway, storageTypes="all")
    browser.console.clear()
    browser.open(f"{gateway}/")
    browser.run("sessionStorage.clear()")
    browser.wait("document.querySelector('#model').value === 'tiny'")
    yield browser
    browser.resize(*DESKTOP)
    browser.prefer("light")
    assert [line for line in browser.console if "status of 401" not in line] == []


def send(page: Browser, text: str) -> None:
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")


def answered(page: Browser, number: int = 1) -> str:
    """The text of the last answer, once the given number of answers is complete."""
    page.wait(
        f"document.querySelectorAll('.message.assistant[aria-busy=false]').length === {number}"
        f" && !document.querySelector('{NO_ANSWER}')"
    )
    return page.text(f"{LAST} .answer")


def test_an_answer_is_shown_as_markdown(page: Browser) -> None:
    send(page, "sample")
    answered(page)
    assert page.text(f"{LAST} h1") == "A heading"
    assert page.text(f"{LAST} strong") == "bold"
    assert page.text(f"{LAST} td") == "1"
    assert page.text(f"{LAST} pre").strip() == 'print("hello")'
    link = f"document.querySelector('{LAST} .answer a')"
    assert page.run(f"{link}.rel").startswith("noopener")
    assert page.run(f"{link}.target") == "_blank"
    assert "token" in page.text(f"{LAST} .facts")
    assert "A heading" in page.run("document.querySelector('#status').textContent")


def test_an_answer_is_streamed_and_escape_stops_it(page: Browser) -> None:
    send(page, "long")
    page.wait(f"document.querySelector('{LAST} .answer').innerText.length > 20")
    assert page.run(f"document.querySelector('{NO_ANSWER}') !== null")
    assert page.run("document.querySelector('#send').hidden")
    page.press("Escape")
    text = answered(page)
    assert len(text) < 5 * LONG_WORDS
    assert "stopped" in page.text(f"{LAST} .facts")
    send(page, "hello")
    assert answered(page, 2) == "user said hello"


def test_the_stop_button_stops_an_answer(page: Browser) -> None:
    send(page, "long")
    page.wait(f"document.querySelector('{LAST} .answer').innerText.length > 20")
    page.click("#stop")
    answered(page)
    page.wait("document.activeElement.id === 'prompt'")


def test_shift_and_enter_inserts_a_line_break(page: Browser) -> None:
    page.click("#prompt")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.run("document.querySelector('#prompt').value") == "one\ntwo"
    page.press("Enter")
    answered(page)
    assert page.text(".bubble") == "one\ntwo"


def test_a_reload_keeps_the_conversation(page: Browser, gateway: str) -> None:
    send(page, "hello")
    answered(page)
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 2")
    assert page.text(f"{LAST} .answer") == "user said hello"
    page.wait("document.querySelector('.conversation')?.innerText === 'hello'")


def test_an_answer_cut_by_a_reload_is_kept_as_far_as_received(page: Browser) -> None:
    send(page, "long")
    page.wait(f"{KEPT}.then((length) => length > 100)")
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 2")
    page.wait(f"document.querySelector('{LAST} .facts').innerText.includes('stopped')")
    assert len(page.text(f"{LAST} .answer")) > 100


def test_a_message_can_be_edited_and_an_answer_regenerated(page: Browser) -> None:
    send(page, "one")
    answered(page)
    send(page, "two")
    answered(page, 2)
    page.click(".message.user [aria-label='Edit the message']")
    page.fill(".edit textarea", "three")
    page.press("Enter")
    assert answered(page) == "user said three"
    assert page.run("document.querySelectorAll('.message').length") == 2
    page.click(f"{LAST} [aria-label='Answer again']")
    assert answered(page) == "user said three"
    assert page.run("document.querySelectorAll('.message').length") == 2


def test_reasoning_is_folded(page: Browser) -> None:
    send(page, "think")
    assert answered(page) == "Seen."
    assert page.text(f"{LAST} summary") == "Reasoning"
    assert "Let me see" not in page.text(LAST)
    page.click(f"{LAST} summary")
    page.wait(f"document.querySelector('{LAST}').innerText.includes('Let me see.')")


def test_a_tool_call_is_a_card_that_takes_a_result(page: Browser) -> None:
    page.click("#open-settings")
    page.fill("#tools", TOOLS)
    send(page, "tool")
    answered(page)
    assert page.text(f"{LAST} .card strong") == "weather"
    assert '"city": "Rome"' in page.text(f"{LAST} .card pre")
    assert page.violations() == []
    page.fill(f"{LAST} .card textarea", "sunny")
    page.click(f"{LAST} .cards .primary")
    assert answered(page, 2).startswith("tool said sunny")


def test_tool_results_stop_the_answer_of_another_conversation(page: Browser) -> None:
    page.click("#open-settings")
    page.fill("#tools", TOOLS)
    send(page, "tool")
    answered(page)
    page.click("#new")
    page.wait("!document.querySelector('.message')")
    send(page, "long")
    page.wait(f"document.querySelector('{LAST} .answer')?.innerText.length > 20")
    page.wait("document.querySelectorAll('.conversation').length === 2")
    page.click("li:last-child .conversation")
    page.wait("document.querySelector('.current .conversation')?.innerText === 'tool'")
    before = page.run(CANCELLED)
    page.click(f"{LAST} .cards .primary")
    assert answered(page, 2).startswith("tool said")
    page.wait(f"{CANCELLED}.then((number) => number === {before + 1})")


def test_settings_are_sent_stored_and_validated(page: Browser) -> None:
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#max_tokens", "3")
    page.fill("#temperature", "7")
    assert "Temperature is out of its range" in page.text("#settings-error")
    send(page, "hello")
    assert page.run("document.querySelector('#prompt').value") == "hello"  # the prompt is not lost
    assert page.run("document.querySelector('.message')") is None
    page.fill("#temperature", "0")
    page.click("#send")
    answered(page)
    assert "cut at its token limit" in page.text(f"{LAST} .facts")
    page.reload()
    page.wait("document.querySelectorAll('.message').length === 2")
    assert page.run("document.querySelector('#max_tokens').value") == "3"
    assert page.run("document.querySelector('#system').value") == "Be brief."


def test_recommended_settings_are_shown_once_known(page: Browser) -> None:
    send(page, "hello")
    answered(page)
    page.wait("document.querySelector('#temperature').placeholder === '0.25'")
    assert page.run("document.querySelector('#top_p').placeholder") == ""


def test_errors_are_shown(page: Browser) -> None:
    page.call("Network.emulateNetworkConditions", **OFFLINE, offline=True)
    try:
        page.run("document.querySelector('#model').replaceChildren()")
        send(page, "hello")
        page.wait(
            "document.querySelector('#warning').innerText === 'The server cannot be reached.'"
        )
        assert page.run("document.querySelector('#prompt').value") == "hello"
    finally:
        page.call("Network.emulateNetworkConditions", **OFFLINE, offline=False)
    page.wait("document.querySelector('#model').value === 'tiny'")
    assert page.text("#warning") == ""
    page.press("Enter")
    answered(page)
    page.console[:] = [line for line in page.console if "ERR_INTERNET" not in line]


def test_conversations_are_listed_renamed_and_deleted(page: Browser) -> None:
    send(page, "first")
    answered(page)
    page.click("#new")
    page.wait("!document.querySelector('.message')")
    send(page, "second")
    answered(page)
    page.wait("document.querySelectorAll('.conversation').length === 2")
    page.click("[aria-label='Rename second']")
    page.fill("#title", "other")
    page.press("Enter")
    page.wait("document.querySelector('.conversation').innerText === 'other'")
    page.click("li:last-child .conversation")
    page.wait("document.querySelector('.bubble')?.innerText === 'first'")
    page.wait("document.querySelector('.current .conversation')?.innerText === 'first'")
    page.click("[aria-label='Delete first']")
    page.click("#delete-dialog .danger")
    page.wait("document.querySelectorAll('.conversation').length === 1")
    assert page.run("document.querySelector('.message')") is None


def test_hostile_markdown_does_nothing(page: Browser) -> None:
    send(page, "hostile")
    text = answered(page)
    assert "the end" in text
    page.run(LOADED)  # the answer is drawn once more
    assert page.run("window.hacked") is None
    answer = f"document.querySelector('{LAST} .answer')"
    kept = f"[...{answer}.querySelectorAll('{BAD}')].filter((e) => !e.closest('.code-head'))"
    assert page.run(f"{kept}.length") == 0
    links = page.run(f"[...{answer}.querySelectorAll('a')].map((a) => a.getAttribute('href'))")
    assert all(link is None or link.startswith("https://") for link in links)
    assert "https://tracker.invalid/p.png" in links
    assert [line for line in page.console if not POLICY.search(line)] == []
    page.console.clear()


def test_no_prefix_of_hostile_markdown_does_anything(page: Browser) -> None:
    """Render every prefix, because an answer is drawn while it is streamed."""
    drawn = f"""(async () => {{
      const {{ rendered }} = await import("/web/markdown.js");
      const text = {json.dumps(HOSTILE)};
      const place = document.querySelector("#messages");
      let found = 0;
      for (let end = 0; end <= text.length; end++) {{
        place.replaceChildren(rendered(text.slice(0, end)));
        const bad = [...place.querySelectorAll("{BAD}")];
        found += bad.filter((one) => !one.closest(".code-head")).length;
      }}
      return found;
    }})()"""
    assert page.run(drawn) == 0
    assert page.run("window.hacked") is None
    assert [line for line in page.console if not POLICY.search(line)] == []
    page.console.clear()


def draw(page: Browser, text: str) -> None:
    page.run(f"({DRAWN})({json.dumps(text)})")


def test_lists_tables_and_code_keep_what_they_say(page: Browser) -> None:
    draw(page, WRITTEN)
    assert page.run("document.querySelector('#messages ol').start") == 3
    alignment = "[...document.querySelectorAll('#messages {}')].map((e) => {})"
    for cells in ("th", "td"):
        aligned = page.run(alignment.format(cells, "e.align"))
        assert aligned == ["left", "center", "right"]
        shown = page.run(alignment.format(cells, "getComputedStyle(e).textAlign"))
        assert [one.removeprefix("-webkit-") for one in shown] == aligned
    languages = "[...document.querySelectorAll('.code-head')].map((e) => e.innerText.trim())"
    assert page.run(languages) == ["python", "nosuchlanguage"]


def test_code_is_colored_and_formulas_are_drawn(page: Browser) -> None:
    draw(page, WRITTEN)
    colored = "[...document.querySelectorAll('#messages .hljs-{}')].map((e) => e.innerText)"
    assert page.run(colored.format("keyword")) == ["def", "return"]
    assert page.run(colored.format("comment")) == ["# of any kind"]
    code = page.run("document.querySelectorAll('#messages pre')[1].innerHTML")
    assert code == "<code>plain\n</code>"
    formulas = "[...document.querySelectorAll('#messages [data-math]')]"
    assert page.run(f"{formulas}.map((e) => [e.dataset.math, !!e.querySelector('math')])") == [
        ["inline", True], ["inline", True], ["block", True], ["block", True], ["inline", False],
    ]  # fmt: skip
    assert "It costs $5 or $6." in page.text("#messages")
    assert r"No TeX: $\nosuchcommand$" in page.text("#messages")
    assert page.run("document.querySelector('#messages mfrac').textContent") == "12"
    assert page.violations() == []


def test_libraries_are_loaded_when_they_are_needed(page: Browser, gateway: str) -> None:
    loaded = "performance.getEntriesByType('resource').map((e) => e.name)"

    def libraries() -> set[str]:
        names = page.run(loaded)
        assert all(name.startswith(f"{gateway}/") for name in names)
        return {name.rpartition("/")[2] for name in names if ".min.js" in name}

    send(page, "hello")
    answered(page)
    assert libraries() == set()
    send(page, "sample")
    answered(page, 2)
    page.wait(f"document.querySelector('{LAST} .hljs-string') !== null")  # drawn again by itself
    assert libraries() == {"highlight.min.js"}


def test_hostile_text_leaves_only_harmless_elements(page: Browser) -> None:
    allowed = {"tags": f"{TAGS} {TABLE_TAGS}".split(), "attributes": ATTRIBUTES.split()}
    found = f"""(() => {{
      const {{ tags, attributes }} = {json.dumps(allowed)};
      const all = [...document.querySelectorAll("#messages *")];
      return all.filter((one) => !one.closest(".code-head, math")).flatMap((one) => [
        ...(tags.includes(one.localName) ? [] : [one.outerHTML]),
        ...one.getAttributeNames().filter((name) => !attributes.includes(name)),
      ]);
    }})()"""
    in_formulas = """[...document.querySelectorAll(
      "math a, math img, math [style], math [id], math [href], math [onclick], math [data-onclick]"
    )].map((one) => one.outerHTML)"""
    links = "[...document.querySelectorAll('#messages a')].map((a) => a.getAttribute('href'))"
    for attack in ATTACKS:
        draw(page, attack)
        assert "end" in page.run("document.querySelector('#messages').textContent"), attack
        assert page.run(found) == [], attack
        assert page.run(in_formulas) == [], attack
        assert set(page.run(links)) <= {None, "https://example.org"}, attack
        assert page.run("document.documentElement.scrollWidth") == DESKTOP[0], attack
        assert page.run("document.querySelector('#messages .error')") is None, attack
    assert page.run("window.hacked") is None
    assert [line for line in page.console if not POLICY.search(line)] == []
    page.console.clear()


def test_text_that_opens_many_formulas_is_drawn_soon(page: Browser) -> None:
    for text in (r"\[ a " * 20000, "$$ a " * 20000, r"\( a " * 20000, "$a" * 40000):
        took = page.run(f"""import("/web/markdown.js").then(({{ rendered }}) => {{
          const began = performance.now();
          rendered({json.dumps(text)});
          return performance.now() - began;
        }})""")
        assert took < 5000, text[:5]


def test_the_length_of_a_formula_in_html_is_bounded(page: Browser) -> None:
    formula = '<span data-math="inline" data-tex="{}">source</span>'
    draw(page, formula.format("x" * 4000) + formula.format("x" * 4001))
    assert page.run("document.querySelectorAll('#messages math').length") == 1
    assert page.text("#messages").endswith("source")


def test_files_of_text_are_attached(page: Browser, tmp_path: Path) -> None:
    kept, other, binary, large = (tmp_path / name for name in ("a.md", "b.txt", "c.bin", "d.txt"))
    kept.write_text("one\n```\ntwo\n```\n")
    other.write_text("three")
    binary.write_bytes(b"\xff\x00")
    large.write_text("x" * (256 * 1024 + 1))
    page.choose("#files", kept, other, binary, large)
    page.wait("document.querySelector('#warning').innerText")
    assert page.text("#warning") == (
        "c.bin is not a UTF-8 text file. d.txt is larger than 256 KiB."
    )
    assert page.text("#chips").split() == ["a.md", "16", "B", "b.txt", "5", "B"]
    assert page.violations() == []
    page.click("[aria-label='Remove b.txt']")
    send(page, "what is this?")
    answered(page)
    assert page.run("document.querySelector('#chips').children.length") == 0
    assert page.text(".message.user .chip-name") == "a.md"
    assert page.text(".bubble") == "what is this?"
    said = "document.querySelector('.message:last-child pre').innerText"
    assert page.run(said).strip() == "one\n```\ntwo\n```"  # the model got the file in a fence
    page.click(".message.user [aria-label='Edit the message']")
    page.fill(".edit textarea", "and now?")
    page.press("Enter")
    assert answered(page).endswith("and now?")
    assert page.run(said).strip() == "one\n```\ntwo\n```"  # an edited message keeps its files
    page.reload()
    page.wait("document.querySelector('.message.user .chip-name')?.innerText === 'a.md'")


def test_two_choices_at_once_add_ten_files_at_most(page: Browser) -> None:
    page.run("""(() => {
      for (const choice of ["a", "b"]) {
        const dataTransfer = new DataTransfer();
        for (let n = 0; n < 6; n++) dataTransfer.items.add(new File(["x"], `${choice}${n}`));
        document.querySelector("main").dispatchEvent(new DragEvent("drop", { dataTransfer }));
      }
    })()""")
    page.wait("document.querySelector('#warning').innerText")
    assert page.text("#warning") == "A message can have at most 10 files."
    assert page.run("document.querySelector('#chips').children.length") == 10


def test_conversations_are_searched(page: Browser) -> None:
    send(page, "the first one")
    answered(page)
    page.click("#new")
    page.wait("!document.querySelector('.message')")
    send(page, "long ago\nthere was a Whale")
    answered(page)
    page.wait("document.querySelectorAll('.conversation').length === 2")
    page.fill("#search", "whale")
    page.wait("document.querySelectorAll('.conversation').length === 1")
    assert "there was a Whale" in page.text(".conversation small")
    assert page.violations() == []
    page.fill("#search", "whale first")
    page.wait("document.querySelector('#nothing-found').hidden === false")
    page.fill("#search", "first")
    page.wait("document.querySelector('.conversation')?.innerText === 'the first one'")
    page.click(".conversation")
    page.wait("document.querySelector('.bubble')?.innerText === 'the first one'")


def test_conversations_are_exported(page: Browser, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    send(page, "A question?")
    answered(page)
    page.click("#open-export")
    page.wait("document.querySelector('#export-dialog').open")
    assert page.violations() == []
    page.press("Enter")
    markdown = tmp_path / "A-question.md"
    wait_until(markdown.exists, "the file")
    assert markdown.read_text() == (
        "# A question?\n\n## You\n\nA question?\n\n## tiny\n\nuser said A question?\n"
    )
    page.click("#new")
    page.wait("!document.querySelector('.message')")
    page.click("#open-export")  # an empty conversation: only all can be chosen
    page.click("#export-dialog [value=json]")
    page.press("Enter")
    file = tmp_path / "A-question.json"
    wait_until(file.exists, "the file")
    (conversation,) = json.loads(file.read_text())["conversations"]
    assert [one["role"] for one in conversation["messages"]] == ["user", "assistant"]
    assert conversation["options"]["temperature"] is None


def test_the_tokens_of_a_conversation_are_shown(page: Browser) -> None:
    assert page.run("document.querySelector('#tokens').hidden")
    send(page, "hello")
    answered(page)
    used = page.run(f"{STORED}.then((messages) => messages.at(-1).usage.total_tokens)")
    page.wait(f"document.querySelector('#tokens').innerText.trim() === '{used} of 8,192 tokens'")
    page.fill("#prompt", "w" * 9000)
    page.wait("document.querySelector('#tokens.full')?.innerText.includes('with this message')")
    page.fill("#prompt", "")
    page.wait(f"document.querySelector('#tokens').innerText.trim() === '{used} of 8,192 tokens'")


def test_a_model_without_a_template_continues_texts(page: Browser) -> None:
    assert page.run("document.querySelector('#no-chat').hidden")
    page.fill("#model", "base")
    page.wait("!document.querySelector('#no-chat').hidden")
    assert "base has no chat template" in page.text("#no-chat")
    assert page.violations() == []
    send(page, "Once upon")
    assert answered(page) == "and Once upon"
    send(page, "a time")
    assert answered(page, 2) == "and Once upon and Once upon\na time"
    page.click("#new")
    page.fill("#model", "tiny")
    page.wait("document.querySelector('#no-chat').hidden")
    send(page, "hello")
    assert answered(page) == "user said hello"


def test_a_conversation_of_another_tab_is_shown(page: Browser) -> None:
    """Another Store of the same page is another tab to the page's own."""
    send(page, "hello")
    answered(page)
    page.run("""import("/web/store.js").then(async ({ Store }) => {
      const tab = await Store.open();
      const [one] = await tab.all();
      one.messages.at(-1).content = "from another tab";
      await tab.put(one);
      await tab.put({ ...one, id: "other", title: "another one" });
    })""")
    page.wait(f"document.querySelector('{LAST} .answer').innerText === 'from another tab'")
    page.wait("document.querySelectorAll('.conversation').length === 2")


def test_an_answer_that_grows_in_another_tab_is_shown_once_it_is_complete(page: Browser) -> None:
    send(page, "hello")
    answered(page)
    page.click("#open-settings")
    page.run("document.querySelector('#system').focus()")
    page.type("half of a")
    page.run("""import("/web/store.js").then(async ({ Store }) => {
      const tab = await Store.open();
      const [one] = await tab.all();
      const say = (content, isFinal) => {
        one.messages.at(-1).content = content;
        return tab.put(one, isFinal);
      };
      const element = document.querySelector(".message");
      window.kept = null;
      await say("growing", false);
      setTimeout(async () => {
        window.kept = element.isConnected;
        await say("complete", true);
      }, 300);
    })""")
    page.wait(f"document.querySelector('{LAST} .answer').innerText === 'complete'")
    assert page.run("window.kept") is True
    assert page.run("document.querySelector('#system').value") == "half of a"


def test_the_policy_blocks_injected_scripts(page: Browser) -> None:
    """An injected script does not run."""
    for script in (
        "document.body.setAttribute('onclick', 'window.hacked = 1')",
        "document.body.innerHTML = '<img src=x onerror=window.hacked=1>'",
        "setTimeout('window.hacked = 1')",
    ):
        with pytest.raises(PageError, match=r"requires 'Trusted|unsafe-eval"):
            page.run(script)
    foreign = "fetch('http://127.0.0.1:9/').then(() => 1, () => 0)"  # another origin
    assert page.run(foreign) == 0
    page.wait_console("connect-src")
    assert page.run("window.hacked") is None
    page.console.clear()


def test_dark_mode_follows_the_system_until_chosen(page: Browser) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.run(color)
    page.prefer("dark")
    page.wait(f"{color} !== '{light}'")
    send(page, "sample")
    answered(page)
    assert page.violations() == []
    page.click("[data-theme-toggle]")
    page.wait(f"{color} === '{light}'")
    page.reload()
    page.wait(f"document.readyState === 'complete' && {color} === '{light}'")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(page: Browser, size: tuple[int, int]) -> None:
    page.resize(*size)
    assert page.violations() == []
    send(page, "sample")
    answered(page)
    send(page, "think")
    answered(page, 2)
    page.click("#open-settings")
    assert page.violations() == []


def test_everything_is_usable_on_a_phone(page: Browser) -> None:
    page.resize(*PHONE)
    send(page, "sample")
    answered(page)
    assert page.run("document.documentElement.scrollWidth") == PHONE[0]
    assert page.run("document.querySelector('#sidebar').inert")
    page.click("#open-sidebar")
    page.wait("document.querySelector('#sidebar').getBoundingClientRect().x === 0")
    assert page.violations() == []
    page.press("Escape")
    page.wait("document.querySelector('#sidebar').inert")
    assert page.run("document.activeElement.id") == "open-sidebar"


def test_every_control_has_keyboard_access_and_visible_focus(page: Browser) -> None:
    page.run("document.querySelector('#skip').focus()")
    seen = ["skip"]
    for _ in range(13):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.className"))
        style = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none" or seen[-1] == "prompt"
    names = "skip brand new search model open-export open-settings scroll attach prompt send"
    order = names.split()
    assert [name for name in seen if name in order][: len(order)] == order


def test_a_server_with_keys_asks_for_one(browser: Browser) -> None:
    with served_gateway(ChatModel, api_keys=("right",), root_path="/llm") as url:
        browser.console.clear()
        browser.open(f"{url}/llm")
        browser.wait("document.querySelector('#key-dialog').open")
        assert browser.violations() == []
        browser.fill("#api-key", "wrong")
        browser.press("Enter")
        browser.wait("document.querySelector('#key-error').innerText.includes('not valid')")
        browser.fill("#api-key", "right")
        browser.press("Enter")
        browser.wait("document.querySelector('#model').value === 'tiny'")
        send(browser, "hello")
        assert answered(browser) == "user said hello"
        browser.reload()
        browser.wait("document.querySelector('#model').value === 'tiny'")
        assert browser.run("sessionStorage.getItem('pdserve /llm/ key')") == "right"
        assert browser.run("JSON.stringify(localStorage).includes('right')") is False
        assert [line for line in browser.console if "401" not in line] == []
