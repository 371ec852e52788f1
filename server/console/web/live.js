// The live part of a page: replaced by the events of the node's stream.
"use strict";
(() => {
  const main = document.getElementById("main");
  const live = document.getElementById("live");
  const summary = document.getElementById("summary");
  const connection = document.getElementById("connection");
  const pause = document.getElementById("pause");
  let stream = null;
  let paused = false;

  const show = (text) => {
    // A status is announced when it changes.
    if (connection.textContent !== text) connection.textContent = text;
  };

  // patch makes the children of old equal to those of fresh. It keeps the elements of old, so that
  // the focus and the scroll position stay.
  const patch = (old, fresh) => {
    const wanted = Array.from(fresh.childNodes);
    wanted.forEach((want, i) => {
      const have = old.childNodes[i];
      if (!have) {
        old.append(want);
      } else if (have.nodeName !== want.nodeName) {
        have.replaceWith(want);
      } else if (have.nodeType !== Node.ELEMENT_NODE) {
        if (have.data !== want.data) have.data = want.data;
      } else {
        for (const a of want.attributes) {
          if (have.getAttribute(a.name) !== a.value) have.setAttribute(a.name, a.value);
        }
        for (const a of Array.from(have.attributes)) {
          if (!want.hasAttribute(a.name)) have.removeAttribute(a.name);
        }
        patch(have, want);
      }
    });
    while (old.childNodes.length > wanted.length) old.lastChild.remove();
  };

  const close = () => {
    if (stream) stream.close();
    stream = null;
  };

  const open = () => {
    if (stream || paused || document.hidden) return;
    stream = new EventSource(main.dataset.live);
    stream.addEventListener("open", () => show("Updated live"));
    stream.addEventListener("live", (event) => {
      const fresh = document.createElement("template");
      fresh.innerHTML = event.data; // escaped by the node
      patch(live, fresh.content);
    });
    stream.addEventListener("summary", (event) => {
      if (summary.textContent !== event.data) summary.textContent = event.data;
    });
    stream.addEventListener("error", () => {
      if (stream.readyState === EventSource.CLOSED) {
        show("Updates were refused; reload the page to try again");
      } else {
        show("Connection lost; trying again");
      }
    });
  };

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    if (paused) {
      close();
      show("Paused");
    } else {
      open();
    }
  });
  // The node has no work for a page that is not visible.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);

  pause.hidden = false;
  show("Connecting");
  open();
})();
