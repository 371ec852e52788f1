package front

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

const (
	// renderPath is vLLM's endpoint for the tokens of a chat with the hashes and the places of its
	// images. vLLM serves it if it was started with --enable-scale-out. Its tokens are right for every
	// model and every field of a chat. The tokens of /tokenize are not.
	renderPath = "/v1/chat/completions/render"
	// mediaBytes is the size of the response of renderPath for each image and for each other part that
	// is not text, in addition to its size for text. It is enough for 32768 tokens.
	mediaBytes = 256 << 10
	// mediaPause is the time for which chats with images are not planned after an engine has refused
	// renderPath or after all attempts of such a chat have failed.
	mediaPause = time.Minute
	// maxPaused is the largest number of models whose chats with images are paused separately.
	maxPaused = 1024
)

// textParts are the types of the parts of a message that are text.
var textParts = []string{"text", "input_text", "output_text", "refusal", "thinking"}

// media describes the parts of a chat that are not text, such as images.
type media struct {
	parts int64 // their number
	bytes int64 // their size in the request
}

// mediaOf returns the parts of a chat that are not text. The KV of its prompt depends on them.
func mediaOf(out *http.Request, f fields) (m media, err error) {
	raw := f.get("messages")
	if !isChat(out) || raw == nil {
		return m, nil
	}
	var messages []struct {
		Content json.RawMessage `json:"content"`
	}
	if err := json.Unmarshal(raw, &messages); err != nil {
		return m, invalid("messages", "want a list of messages")
	}
	for i, one := range messages {
		if !bytes.HasPrefix(one.Content, []byte("[")) {
			continue
		}
		var parts []json.RawMessage
		if err := json.Unmarshal(one.Content, &parts); err != nil {
			return m, invalid(fmt.Sprintf("messages[%d].content", i), err.Error())
		}
		for _, part := range parts {
			var p struct {
				Type string `json:"type"`
			}
			text := part[0] == '"' || json.Unmarshal(part, &p) == nil && slices.Contains(textParts, p.Type)
			if !text {
				m.parts++
				m.bytes += int64(len(part))
			}
		}
	}
	return m, nil
}

// image is an image, or other content that is not text, in a prompt.
type image struct {
	hash string // vLLM's hash of the content
	// The tokens that stand for the image are those from offset on, length in number.
	offset, length int
}

// pauses has the models whose chats with images are not planned for a time. The model "" stands for all
// models.
type pauses struct {
	mu    sync.Mutex
	until map[string]time.Time
}

// paused reports whether chats of a model with images are not planned now.
func (p *pauses) paused(model string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	return now.Before(p.until[""]) || now.Before(p.until[model])
}

// pause begins a pause of mediaPause.
func (p *pauses) pause(model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(p.until, func(_ string, end time.Time) bool { return now.After(end) })
	if p.until == nil {
		p.until = make(map[string]time.Time)
	}
	if len(p.until) >= maxPaused {
		model = ""
	}
	p.until[model] = now.Add(mediaPause)
}

// notRenderedError: no engine has returned the tokens of a chat with the hashes of its images. The chat
// is served without a plan.
type notRenderedError struct{ cause error }

func (e *notRenderedError) Error() string {
	return "POST " + renderPath + ": " + e.cause.Error()
}

func (e *notRenderedError) Unwrap() error { return e.cause }

// render returns the tokens of a chat with images, and the images in the order of their tokens. Errors
// are of type *notRenderedError.
func (r *planned) render(out *http.Request, req *request, m media) ([]kv.Token, []image, error) {
	tokens, images, err := r.askRender(out, req, m)
	if err == nil {
		return tokens, images, nil
	}
	if out.Context().Err() == nil {
		r.front.metrics.renderErrors.Inc()
		r.front.opts.Logger.Debug("no engine sent the tokens of a chat with images", "err", err)
	}
	return nil, nil, &notRenderedError{err}
}

// renderText returns the tokens of a chat without images, or nil if no engine sends them.
func (r *planned) renderText(out *http.Request, req *request) []kv.Token {
	if r.pauses.paused("") {
		return nil
	}
	tokens, images, err := r.askRender(out, req, media{})
	if err != nil || len(images) > 0 {
		r.front.opts.Logger.Debug("no engine rendered a chat, whose tokens come from /tokenize", "err", err)
		return nil
	}
	return tokens
}

func (r *planned) askRender(out *http.Request, req *request, m media) ([]kv.Token, []image, error) {
	f := r.front
	// The engine gets the client's request, because most of its fields may decide the tokens. With
	// mm_payload "none" the response has no pixels.
	ask := req.fields.edited(edit{transferField, nil}, edit{"mm_payload", []byte(`"none"`)})
	maxBytes := tokenBytes*(ask.size()-m.bytes) + mediaBytes*m.parts + answerBytes
	if !f.bodies.TryAcquire(maxBytes) {
		return nil, nil, errors.New(noMemory)
	}
	defer f.bodies.Release(maxBytes)
	resp, err := f.ask(out, http.MethodPost, renderPath, ask)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	name := resp.Body.(*answer).engine.name
	if refusesRender(resp) {
		r.pauses.pause("")
		if !r.renderRefused.Swap(true) {
			f.opts.Logger.Warn("an engine refuses "+renderPath+", so chats with images go to one engine without a plan, and so do other chats, after failed attempts, if the engines have other tokens for them than /tokenize; start the engines with --enable-scale-out", "engine", name, "status", resp.Status)
		}
	}
	tokens, images, err := renderedIn(resp, maxBytes)
	if err == nil && m.parts > 0 && len(images) == 0 {
		err = errors.New("the response has no images")
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	r.renderRefused.Store(false)
	return tokens, images, nil
}

// refusesRender reports whether a response means that the engine does not serve renderPath. vLLM
// without --enable-scale-out responds with 403, and a server without this path with 404. vLLM responds
// with 404 for an unknown model too; then the response has an error object.
func refusesRender(resp *http.Response) bool {
	switch resp.StatusCode {
	case http.StatusForbidden, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return true
	case http.StatusNotFound:
		var got struct {
			Error json.RawMessage `json:"error"`
		}
		return decodeBody(resp, answerBytes, &got) != nil || got.Error == nil
	}
	return false
}

// renderedIn decodes the response of renderPath, which may have at most maxBytes bytes.
func renderedIn(resp *http.Response, maxBytes int64) ([]kv.Token, []image, error) {
	var got struct {
		Tokens   []kv.Token `json:"token_ids"`
		Features struct {
			Hashes map[string][]string                       `json:"mm_hashes"`
			Places map[string][]struct{ Offset, Length int } `json:"mm_placeholders"`
		} `json:"features"`
	}
	if err := decode(resp, maxBytes, &got); err != nil {
		return nil, nil, err
	}
	var images []image
	places := 0
	for kind, hashes := range got.Features.Hashes {
		if len(hashes) != len(got.Features.Places[kind]) {
			return nil, nil, fmt.Errorf("the response has %d hashes of kind %.20q and %d places", len(hashes), kind, len(got.Features.Places[kind]))
		}
		for i, p := range got.Features.Places[kind] {
			images = append(images, image{hashes[i], p.Offset, p.Length})
		}
	}
	for _, p := range got.Features.Places {
		places += len(p)
	}
	if places != len(images) {
		return nil, nil, fmt.Errorf("the response has %d hashes and %d places of images", len(images), places)
	}
	if len(got.Tokens) == 0 {
		return nil, nil, errors.New("the response has no tokens")
	}
	slices.SortFunc(images, func(a, b image) int { return a.offset - b.offset })
	end := 0
	for _, one := range images {
		if one.hash == "" || one.offset < end || one.length < 1 || one.length > len(got.Tokens)-one.offset {
			return nil, nil, fmt.Errorf("the response has an image with the hash %.80q that takes %d tokens from token %d on, after one that ends at %d, of a prompt of %d", one.hash, one.length, one.offset, end, len(got.Tokens))
		}
		end = one.offset + one.length
	}
	return got.Tokens, images, nil
}
