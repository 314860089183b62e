// Brings the first page up to date every five seconds, while it can be seen and nobody is in it.
const board = document.getElementById("idem-live"), when = document.getElementById("idem-when");
const auto = document.getElementById("idem-auto");
const isUsed = () => board.contains(document.activeElement);
async function refresh() {
  if (document.hidden || !auto.firstElementChild.checked || isUsed()) return;
  try {
    const answer = await fetch(location.href, { redirect: "error", signal: AbortSignal.timeout(4000) });
    if (!answer.ok) throw new Error(answer.status === 503 ? "the store does not answer" : `HTTP ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!isUsed()) board.replaceChildren(...page.getElementById("idem-live").childNodes);
    when.textContent = `As of ${new Date().toLocaleTimeString()}.`;
  } catch (error) {
    when.textContent = `Not refreshed: ${error.message}.`;
  }
}
auto.hidden = false;
auto.addEventListener("change", refresh);
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, 5000);
