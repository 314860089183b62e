// Keeps a status page up to date until the operation is settled: asks for the page again, and replaces what changed.
(() => {
  "use strict";
  const page = () => document.getElementById("status");
  const tell = (id, told) => {
    const notice = document.getElementById(id);
    if (notice.hidden === told) notice.hidden = !told;
  };
  let etag = null;

  // Returns whether to ask again.
  const look = async () => {
    const headers = { Accept: "text/html" };
    if (etag) headers["If-None-Match"] = etag;
    const answer = await fetch(location.href, {
      headers, cache: "no-store", credentials: "same-origin", redirect: "manual",
    });
    if (answer.status === 304) return true;
    // To the login; nothing is followed by a page that nobody may see.
    if (answer.type === "opaqueredirect" || answer.status === 401 || answer.status === 403) {
      tell("logged-out", true);
      return false;
    }
    if (!answer.ok && answer.status !== 404) throw new Error(String(answer.status));
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const other = fresh.getElementById("status");
    if (!other) throw new Error("not a status page");
    etag = answer.headers.get("ETag");
    document.title = fresh.title;
    if (answer.status === 404) {
      page().replaceWith(document.adoptNode(other)); // given back, forgotten, or over
      return false;
    }
    const now = page().querySelectorAll("[data-live]");
    other.querySelectorAll("[data-live]").forEach((part, at) => {
      if (!now[at].isEqualNode(part)) {
        now[at].className = part.className;
        now[at].replaceChildren(...part.childNodes);
      }
    });
    page().dataset.settled = other.dataset.settled;
    return page().dataset.settled !== "yes";
  };

  const soon = () => setTimeout(again, Number(page().dataset.every) * 1000);
  const again = async () => {
    let more = true;
    try {
      more = await look();
      tell("trouble", false);
    } catch {
      tell("trouble", true);
    }
    if (more) soon();
  };
  if (page().dataset.settled !== "yes") soon();
})();
