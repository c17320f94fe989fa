// The API key: asked for when the server wants one, kept as long as the tab.

const KEPT = "flowspec-key";
const dialog = document.querySelector("#ask-key");
const field = document.querySelector("#key");
let asking = null;

dialog.addEventListener("cancel", (event) => event.preventDefault());  // without a key there is nothing

/** The headers that let a request in. */
export function headers() {
  const key = sessionStorage.getItem(KEPT);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Ask for the key; resolves when there is a new one. */
export function askKey() {
  asking ??= new Promise((resolve) => {
    document.querySelector("#key-wrong").textContent =
      sessionStorage.getItem(KEPT) ? "That is not the key." : "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEPT, field.value);
      field.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
