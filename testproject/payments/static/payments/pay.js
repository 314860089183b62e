// Sends the same request with the same key as often as the button is pressed, and shows every answer.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const url = $("order").dataset.url;
  const token = document.querySelector("[name=csrfmiddlewaretoken]").value;
  let presses = 0;

  const setKey = (key) => {
    $("key").value = key;
    const here = new URL(location.href);
    here.searchParams.set("key", key);
    history.replaceState(null, "", here);
    $("tab").href = here;
  };
  // Without a secure context there is no randomUUID().
  const fresh = () =>
    [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

  const cell = (row, content, name) => {
    const made = document.createElement("td");
    made.append(content);
    if (name) made.className = name;
    row.append(made);
  };
  const trouble = (text) => {
    $("trouble").textContent = text;
    $("trouble").hidden = !text;
  };

  const press = async () => {
    const row = document.createElement("tr");
    cell(row, String(++presses));
    $("none")?.remove();
    $("answers").append(row);
    const order = { amount: Number($("amount").value), currency: $("currency").value, recipient: $("recipient").value };
    const key = $("key").value.replace(/[\\"]/g, "\\$&");
    try {
      const answer = await fetch(url, {
        method: "POST",
        headers: { "Content-Type": "application/json", "Idempotency-Key": `"${key}"`, "X-CSRFToken": token },
        body: JSON.stringify(order),
      });
      const told = await answer.json();
      cell(row, `${answer.status} ${told.code || ""}`);
      cell(row, told.state || told.title || "");
      cell(row, answer.headers.get("Idempotent-Replayed") === "true" ? "yes" : "no");
      const link = document.createElement("a");
      const where = answer.headers.get("Location") || answer.headers.get("Content-Location");
      link.href = where || "";
      link.textContent = where ? "look" : "";
      cell(row, where ? link : "");
      trouble("");
    } catch {
      cell(row, "no answer");
      trouble("The server did not answer. Press again: that is what the key is for.");
    }
    await look();
  };

  const look = async () => {
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    const made = await answer.json();
    const mine = made.filter((payment) => payment.key === $("key").value);
    $("count").textContent = String(mine.length);
    $("state").textContent = mine.length === 1 ? "payment" : "payments";
    $("ledger").replaceChildren(
      ...made.map((payment) => {
        const row = document.createElement("tr");
        cell(row, String(payment.id));
        cell(row, `${(payment.amount / 100).toFixed(2)} ${payment.currency}`, "number");
        cell(row, payment.recipient);
        cell(row, payment.key, "key");
        return row;
      }),
    );
  };
  const keepLooking = async () => {
    await look().catch(() => {});
    setTimeout(keepLooking, 1000);
  };

  $("order").addEventListener("submit", (event) => {
    event.preventDefault();
    press();
  });
  $("new").addEventListener("click", () => {
    setKey(fresh());
    look().catch(() => {});
  });
  $("key").addEventListener("change", () => setKey($("key").value));
  setKey(new URL(location.href).searchParams.get("key") || fresh());
  keepLooking();
})();
