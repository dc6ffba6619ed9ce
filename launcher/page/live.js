// A page that is served follows its run; the button holds it still.
const follows = el("button", {type: "button", "aria-pressed": "true", onclick: () => follows.setAttribute("aria-pressed", follows.getAttribute("aria-pressed") !== "true")}, "live");
document.querySelector("nav").before(follows);
const source = new EventSource("events");
source.onopen = () => { follows.textContent = "live"; };
source.onerror = () => { follows.textContent = "flowrun top has ended"; };
source.onmessage = event => {
  if (follows.getAttribute("aria-pressed") !== "true") return;
  const at = scrollY;
  Object.assign(page, JSON.parse(event.data));
  draw();
  redraws.forEach(each => each());
  scrollTo(0, at);
};
