// Keeps a status page up to date until the operation is settled: asks for the page again, and replaces what changed.
(() => {
  "use strict";
  const page = () => document.getElementById("status");
  const trouble = document.getElementById("trouble");
  let etag = null;

  const look = async () => {
    const headers = { Accept: "text/html" };
    if (etag) headers["If-None-Match"] = etag;
    const answer = await fetch(location.href, { headers, cache: "no-store", credentials: "same-origin" });
    if (answer.status === 304) return;
    if (!answer.ok) throw new Error(String(answer.status));
    etag = answer.headers.get("ETag");
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const now = page().querySelectorAll("[data-live]");
    fresh.querySelectorAll("[data-live]").forEach((part, at) => {
      if (!now[at].isEqualNode(part)) {
        now[at].className = part.className;
        now[at].replaceChildren(...part.childNodes);
      }
    });
    page().dataset.settled = fresh.getElementById("status").dataset.settled;
    document.title = fresh.title;
  };

  const again = async () => {
    if (page().dataset.settled === "yes") return;
    try {
      await look();
      trouble.hidden = true;
    } catch {
      trouble.hidden = false;
    }
    setTimeout(again, Number(page().dataset.every) * 1000);
  };
  setTimeout(again, Number(page().dataset.every) * 1000);
})();
