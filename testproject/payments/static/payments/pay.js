// Sends the same request with the same key as often as the button is pressed, and shows every answer.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const { url } = $("order").dataset;
  // Of the login that this page was loaded for: after another one in another tab the server refuses it, and nobody
  // pays in somebody else's name.
  const token = document.querySelector("#order [name=csrfmiddlewaretoken]").value;
  const fields = ["key", "amount", "currency", "recipient"];
  let presses = 0;
  let status = "";

  // -- the payment is in the address: for a reload, for the way back, for another tab

  const keep = () => {
    const here = new URL(location.href);
    for (const name of fields) here.searchParams.set(name, $(name).value);
    history.replaceState(null, "", here);
    $("tab").href = here;
  };
  const restore = () => {
    const given = new URL(location.href).searchParams;
    for (const name of fields) if (given.get(name)) $(name).value = given.get(name);
    if (!$("key").value) $("key").value = fresh();
    keep();
  };
  // Without a secure context there is no randomUUID().
  const fresh = () =>
    [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

  const make = (tag, content, name) => {
    const made = document.createElement(tag);
    made.append(...[content].flat());
    if (name) made.className = name;
    return made;
  };
  const say = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const trouble = (text = "") => {
    say($("trouble"), text);
    $("trouble").hidden = !text;
  };
  const reasons = (told) =>
    Object.entries(told.errors || {}).map(([name, texts]) => `${name}: ${[texts].flat().join(" ")}`).join(" ");

  // -- asking

  const ask = async (where, options = {}) => {
    const answer = await fetch(where, {
      ...options,
      // Without the header, the server's challenge would make the browser ask for a password.
      headers: { Accept: "application/json", "X-Requested-With": "fetch", ...options.headers },
    });
    // What is not JSON is not of the API, but of something between it and us: the status says enough.
    return { answer, told: await answer.json().catch(() => ({})) };
  };

  const press = async () => {
    const row = make("tr", make("td", String(++presses), "number"));
    const add = (...cells) => row.append(...cells.map((content) => make("td", content)));
    const waiting = make("td", "…");
    waiting.colSpan = 3;
    row.append(waiting);
    $("none")?.remove();
    $("answers").append(row);
    const [key, amount, currency, recipient] = fields.map((name) => $(name).value);
    try {
      const { answer, told } = await ask(url, {
        method: "POST",
        headers: {
          "Content-Type": "application/json",
          "Idempotency-Key": `"${key.replace(/[\\"]/g, "\\$&")}"`,
          "X-CSRFToken": token,
        },
        body: JSON.stringify({ amount: Number(amount), currency, recipient }),
      });
      waiting.remove();
      const where = answer.headers.get("Location") || answer.headers.get("Content-Location");
      const link = make("a", "Status");
      link.href = where || "";
      const short = told.state || told.title || "";
      const why = reasons(told) || told.detail || "";
      add([`${answer.status} ${short}`, make("small", why === short ? "" : why)],
        answer.headers.get("Idempotent-Replayed") === "true" ? "yes" : "no", where ? link : "–");
      if (where && key === $("key").value) status = where;
      trouble();
    } catch {
      waiting.remove();
      add("No answer", "–", "–");
      trouble("The server did not answer. Press again: that is what the key is for.");
    }
    await look();
  };

  // -- looking at what came of it

  // The next look may have more luck; a press says so itself.
  const look = () => Promise.all([lookAtPayments(), lookAtStatus()]).catch(() => {});
  const lookAtPayments = async () => {
    const { answer, told } = await ask(url);
    if (!answer.ok) return;
    const mine = told.filter((payment) => payment.key === $("key").value).length;
    say($("count"), String(mine));
    say($("unit"), mine === 1 ? "payment" : "payments");
  };
  const lookAtStatus = async () => {
    const asked = status;
    const { answer, told } = asked ? await ask(asked) : { told: {} };
    if (asked !== status || (answer && !answer.ok)) return;
    say($("state"), told.error ? `${told.state}: ${told.error.detail}` : told.state || "");
    $("state").hidden = !told.state;
    $("state").classList.toggle("good", told.state === "COMPLETED");
    $("state").classList.toggle("bad", Boolean(told.error));
  };
  const keepLooking = async () => {
    if (!document.hidden) await look();
    setTimeout(keepLooking, 1000);
  };

  const another = () => {
    keep();
    presses = 0;
    status = "";
    trouble();
    const none = make("tr", make("td", "None yet.", "none"));
    none.id = "none";
    none.firstChild.colSpan = 4;
    $("answers").replaceChildren(none);
    look();
  };
  $("order").addEventListener("submit", (event) => {
    event.preventDefault();
    press();
  });
  $("new").addEventListener("click", () => {
    $("key").value = fresh();
    another();
  });
  $("key").addEventListener("change", another);
  for (const name of fields.slice(1)) $(name).addEventListener("change", keep);
  restore();
  keepLooking();
})();
