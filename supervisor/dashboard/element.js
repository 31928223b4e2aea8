// Makes and finds elements. Data only ever becomes text: nothing here or elsewhere parses markup.

/** The element with that id. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Make an element. Attributes that are false, null or undefined are left out, functions become listeners ("onclick").
 * Children that are no nodes become text.
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return made;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Name and value for a description list; null where there is no value. */
export function fact(name, ...values) {
  if (values[0] === null || values[0] === undefined) return null;
  return el("div", {}, el("dt", {}, name), el("dd", {}, ...values));
}

/** The same in a line of its own. */
export function longFact(name, ...values) {
  const made = fact(name, ...values);
  made?.classList.add("long");
  return made;
}

/** Show text in an element and the element itself, or hide it where there is none. */
export function say(element, text) {
  if (text && element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

/** Give an element new children, unless they would look the same: what has not changed keeps its selection. */
export function fill(element, children) {
  const wanted = children.filter((child) => child !== null && child !== undefined);
  const there = [...element.childNodes];
  if (there.length === wanted.length && wanted.every((child, at) => child.isEqualNode(there[at]))) return;
  element.replaceChildren(...wanted);
}

/** Say something to those who do not see the page change. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Open a dialog; the element that opened it gets the focus back when it closes. */
export function openDialog(dialog, first) {
  const opener = document.activeElement;
  dialog.showModal();
  first.focus();
  dialog.addEventListener("close", () => {
    if (opener && opener.isConnected && !opener.closest("[hidden]")) opener.focus();
    else (byId("job").hidden ? byId("main") : byId("job-title")).focus();
  }, { once: true });
}

/** Let the buttons that say so close the dialog they are in. */
export function closers(dialog) {
  for (const button of dialog.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => dialog.close());
  }
}
