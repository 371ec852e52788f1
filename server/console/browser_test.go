package console_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/server/console"
)

// browser is a tab of Chromium.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	messages []string // of the console: errors, warnings and exceptions
}

// openBrowser starts Chromium, and ends it with the test. The test fails if a page has written an
// error, a warning or a violation of its policy to the console of the browser. Servers start before
// the browser, so that they end after it: a page reports a stream that its server cuts.
func openBrowser(t *testing.T) *browser {
	t.Helper()
	path := testkit.Program(t, "chromium", "chromium")
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	ctx, end := chromedp.NewExecAllocator(ctx, append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.WSURLReadTimeout(2*time.Minute))...)
	ctx, closeTab := chromedp.NewContext(ctx)
	b := &browser{t: t, ctx: ctx}
	collected := make(chan struct{})
	messages := chromedp.Console(ctx)
	go func() {
		defer close(collected)
		for m, err := range messages {
			if err != nil {
				return
			}
			if m.Type != chromedp.ConsoleLog && m.Type != chromedp.ConsoleDebug && m.Type != chromedp.ConsoleInfo {
				b.mu.Lock()
				b.messages = append(b.messages, m.String())
				b.mu.Unlock()
			}
		}
	}()
	t.Cleanup(func() {
		closeTab()
		end()
		cancel()
		<-collected
		if len(b.messages) > 0 {
			t.Errorf("the pages wrote to the console of the browser:\n%s", strings.Join(b.messages, "\n"))
		}
	})
	b.do(chromedp.EmulateViewport(1180, 640))
	return b
}

func (b *browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

// open loads a page, and waits until its stream is open.
func (b *browser) open(url string) {
	b.t.Helper()
	b.do(chromedp.Navigate(url))
	b.await(`document.getElementById("connection").textContent === "Updated live"`)
}

// await waits until an expression of JavaScript is true, also across the load of another page. An
// expression that throws, as it may while a page is being loaded, is not true.
func (b *browser) await(expression string) {
	b.t.Helper()
	for limit := time.Now().Add(patience); ; {
		ok, err := chromedp.Run(b.ctx, chromedp.Evaluate[bool](`new Promise(r => setTimeout(() => { try { r(Boolean(`+expression+`)) } catch { r(false) } }, 10))`, chromedp.EvalAwaitPromise))
		if ok {
			return
		}
		if time.Now().After(limit) || b.ctx.Err() != nil {
			b.t.Fatalf("%s: %v; the page is\n%.600s", expression, err, b.text("document.body.innerText"))
		}
	}
}

func (b *browser) text(expression string) string {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[string](expression))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// press sends keys to the element that has the focus.
func (b *browser) press(keys string) {
	b.t.Helper()
	b.do(chromedp.KeyEvent(keys))
}

// Keys of the keyboard.
const (
	tab   = "\t"
	enter = "\r"
)

// focused describes the element that has the focus.
func (b *browser) focused() string {
	b.t.Helper()
	return b.text(`(e => e.tagName + " " + (e.id || e.getAttribute("aria-label") || e.textContent.trim()))(document.activeElement)`)
}

// theme makes the browser prefer light or dark pages.
func (b *browser) theme(name string) {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}}); err != nil {
		b.t.Fatal(err)
	}
}

// shoot writes a picture of the page into the directory $PENSTOCK_CONSOLE_SCREENSHOTS, if it is set.
func (b *browser) shoot(name string) {
	b.t.Helper()
	dir := os.Getenv("PENSTOCK_CONSOLE_SCREENSHOTS")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// structure returns the parts of the page that screen readers need and that are missing.
const structure = `(() => {
  const missing = [];
  const one = (what) => { const n = document.querySelectorAll(what).length; if (n !== 1) missing.push(n + " × " + what); };
  ["main", "h1", "header", "nav[aria-label='Pages']", "html[lang]", "[aria-current=page]", "title", "#summary[role=status]", "#connection[role=status]"].forEach(one);
  for (const t of document.querySelectorAll("table")) {
    if (!t.caption || !t.caption.textContent) missing.push("caption");
    for (const h of t.querySelectorAll("th")) if (!h.scope) missing.push("scope of " + h.textContent);
    for (const r of t.tBodies[0].rows) if (!r.querySelector("th[scope=row]")) missing.push("head of a row");
  }
  for (const i of document.querySelectorAll("input:not([type=hidden])")) if (!i.labels.length) missing.push("label of " + i.name);
  for (const e of document.querySelectorAll("section, [role=region]")) {
    const by = e.getAttribute("aria-labelledby");
    if (by ? !document.getElementById(by) : !e.getAttribute("aria-label")) missing.push("name of a region");
  }
  for (const s of document.querySelectorAll(".state")) if (!s.textContent) missing.push("text of a state");
  return missing.join(", ");
})()`

// TestBrowser opens the pages in Chromium: they are complete for screen readers, show changes, keep
// the focus, work by keyboard, and follow the light or dark preference.
func TestBrowser(t *testing.T) {
	src := activity()
	src.overview, src.namespaces = sample(), many()
	c, url := serve(t, console.Options{Source: src, Node: "n1", Interval: 20 * time.Millisecond})
	b := openBrowser(t)
	b.theme("light")

	b.open(url + "/")
	if missing := b.text(structure); missing != "" {
		t.Errorf("the overview has %s", missing)
	}
	b.shoot("console-overview")
	src.set(func(s *source) {
		s.overview = sample()
		s.overview.NICs[1].Up, s.overview.NICs[1].Reason = true, ""
	})
	b.await(`document.getElementById("summary").textContent === "Node n1 is serving. 4 faults. 2 members. Down: 1 node."`)
	b.await(`!document.getElementById("live").innerText.includes("no carrier")`)

	for _, page := range []string{"prefixes", "pins", "actions"} {
		b.open(url + "/" + page)
		if missing := b.text(structure); missing != "" {
			t.Errorf("the page %s has %s", page, missing)
		}
		b.shoot("console-" + page)
	}
	b.open(url + "/")

	// The keyboard: the link that skips, the navigation, and the next page.
	b.press(tab)
	if f := b.focused(); f != "A Skip to the content" {
		t.Errorf("the first key Tab leads to %s", f)
	}
	if outline := b.text(`getComputedStyle(document.activeElement).outlineStyle`); outline == "none" {
		t.Error("the focus is not visible")
	}
	b.press(enter)
	b.await(`document.activeElement.id === "main"`)
	b.open(url + "/")
	for _, want := range []string{"A Skip to the content", "A Overview", "A Namespaces"} {
		b.press(tab)
		if f := b.focused(); f != want {
			t.Errorf("the key Tab leads to %s, want %s", f, want)
		}
	}
	b.press(enter)
	b.await(`document.title.startsWith("Namespaces") && document.getElementById("connection").textContent === "Updated live"`)

	// 10,000 namespaces: a page has 100, and the focus stays while rows change.
	if missing := b.text(structure); missing != "" {
		t.Errorf("the page of the namespaces has %s", missing)
	}
	b.await(`document.querySelectorAll("tbody tr").length === 100`)
	b.shoot("console-namespaces")
	b.do(chromedp.Focus(chromedp.CSS(`a[href="/namespaces?order=desc&sort=used"]`)))
	src.set(func(s *source) {
		s.namespaces = many()
		s.namespaces[0].Name = "another name"
	})
	b.await(`document.querySelector("tbody th").textContent === "another name"`)
	if f := b.focused(); f != "A Used" {
		t.Errorf("the focus is on %s after an update", f)
	}
	b.press(enter)
	b.await(`location.search.includes("sort=used") && document.querySelector("tbody th").textContent === "model-09999" && document.querySelector("th[aria-sort=descending]").textContent.startsWith("Used")`)
	b.do(chromedp.Focus(chromedp.ID("filter")))
	b.press("model-012" + enter)
	b.await(`location.search.includes("q=model-012") && document.querySelectorAll("tbody tr").length === 100 && document.getElementById("connection").textContent === "Updated live"`)
	if s := b.text(`document.getElementById("summary").textContent`); s != "100 of 10,000 namespaces match the filter." {
		t.Errorf("the summary is %q", s)
	}

	// The button stops the updates, and starts them again.
	b.do(chromedp.Focus(chromedp.ID("pause")))
	b.press(" ")
	b.await(`document.getElementById("connection").textContent === "Paused" && document.getElementById("pause").getAttribute("aria-pressed") === "true"`)
	b.press(" ")
	b.await(`document.getElementById("connection").textContent === "Updated live"`)

	// A name with HTML is text.
	src.set(func(s *source) {
		s.namespaces = []console.Namespace{{NamespaceRow: top.NamespaceRow{Name: `<img src=x onerror="document.title='attacked'"><script>document.title='attacked'</script>`}}}
	})
	b.open(url + "/namespaces")
	b.await(`document.querySelector("tbody th").textContent.startsWith("<img src=x")`)
	if b.text(`String(document.querySelectorAll("img, tbody script").length)`) != "0" || strings.Contains(b.text("document.title"), "attacked") {
		t.Error("the HTML of a name is in the page")
	}

	// Light and dark.
	background := `getComputedStyle(document.body).backgroundColor`
	light := b.text(background)
	b.theme("dark")
	if dark := b.text(background); light != "rgb(255, 255, 255)" || dark == light {
		t.Errorf("the background is %s when light and %s when dark is preferred", light, dark)
	}
	b.open(url + "/")
	b.shoot("console-overview-dark")

	// The end of the node.
	b.do(chromedp.Navigate("about:blank"))
	c.Close()
}

// TestPolicy: the policy of the pages blocks a script that is in the page.
func TestPolicy(t *testing.T) {
	_, url := serve(t, console.Options{Source: &source{overview: sample()}})
	b := openBrowser(t)
	b.open(url + "/")
	b.do(chromedp.Evaluate[chromedp.Void](`(() => {
  const s = document.createElement("script");
  s.textContent = "document.title = 'attacked'";
  document.body.append(s);
})()`))
	b.await(`true`)
	if b.text("document.title") == "attacked" {
		t.Error("an inline script ran")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.messages) == 0 {
		t.Error("the browser reported no violation of the policy")
	}
	b.messages = nil // the expected violation
}
