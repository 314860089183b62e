/* Counts leases down, and looks again by itself. Every page says the same without it. */
"use strict";
(function () {
  function words(ms) {
    const past = ms < 0;
    let seconds = Math.floor(Math.abs(ms) / 1000);
    const parts = [];
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
      const count = Math.floor(seconds / size);
      seconds -= count * size;
      if (count || (unit === "s" && !parts.length)) {
        parts.push(`${count} ${unit}`);
      }
    }
    const text = parts.slice(0, 2).join(" ");
    return past ? `ran out ${text} ago` : `${text} left`;
  }

  let timers = [];
  let started = 0;
  function findTimers() {
    started = performance.now();
    timers = Array.from(document.querySelectorAll("[data-left-ms]"), (element) => ({
      element, left: Number(element.dataset.leftMs),
    }));
    tick();
  }
  function tick() {
    const passed = performance.now() - started;
    for (const { element, left } of timers) {
      const text = words(left - passed);
      if (element.textContent !== text) {
        element.textContent = text;
      }
    }
  }
  findTimers();
  document.addEventListener("idem-refreshed", findTimers);
  setInterval(tick, 250);

  const refresh = document.querySelector(".idem-refresh");
  if (!refresh) {
    return;
  }
  const box = refresh.querySelector("input");
  const said = refresh.querySelector("span");
  const name = "celery-idempotent-refresh";
  refresh.hidden = false;
  box.checked = localStorage.getItem(name) !== "no";
  box.addEventListener("change", () => localStorage.setItem(name, box.checked ? "yes" : "no"));

  /* Nobody is disturbed who reads details, has ticked or chosen something, selects text or goes by the keyboard. */
  function busy(part) {
    const selection = document.getSelection();
    return part.contains(document.activeElement) || (!selection.isCollapsed && part.contains(selection.anchorNode))
      || part.querySelector("details[open]") !== null
      || Array.from(part.querySelectorAll("input:not([type=hidden]), select"))
        .some((each) => (each.type === "checkbox" ? each.checked : each.value));
  }
  async function lookAgain() {
    if (!box.checked || document.hidden) {
      return;
    }
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", redirect: "error" });
      if (!answer.ok) {
        throw new Error(answer.status);
      }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const parts = Array.from(document.querySelectorAll("[data-live]"));
      if (parts.some(busy)) {
        return;
      }
      for (const part of parts) {
        const now = page.getElementById(part.id);
        if (now && now.outerHTML !== part.outerHTML) {
          part.replaceWith(document.adoptNode(now));
        }
      }
      said.textContent = `(last at ${new Date().toLocaleTimeString()})`;
      document.dispatchEvent(new Event("idem-refreshed"));
    } catch (error) {
      said.textContent = "(the last time there was no answer: load the page again)";
    }
  }
  setInterval(lookAgain, 1000 * Number(refresh.dataset.every));
})();
