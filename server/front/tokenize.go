package front

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/kv"
)

// The fields of a request that determine its tokens. They are the fields of vLLM's POST /tokenize.
var (
	textFields = []string{"model", "add_special_tokens"} // and prompt
	chatFields = []string{"model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "tools", "chat_template", "chat_template_kwargs"}
)

// notPlanned are fields that make the KV of a prompt depend on more than the tokens from /tokenize.
var notPlanned = []string{"prompt_embeds", "truncate_prompt_tokens", "documents"}

const (
	// The response of /tokenize may have tokenBytes for each byte of the request, plus answerBytes.
	// On average a token has at least one byte of text in the request and at most 8 bytes of JSON
	// in the response. answerBytes is for the tokens of the chat template and the other members of
	// the response.
	tokenBytes  = 8
	answerBytes = 64 << 10
)

// unsupported returns the refusal of a request with a field that the planned router does not
// support.
func unsupported(field, why string) error {
	return &refusal{reason: rejectUnsupported, status: http.StatusBadRequest, code: "unsupported", message: fmt.Sprintf("%s: %s; the gateway sends requests to a prefill/decode cluster (--planner), where that is not supported yet", field, why)}
}

// invalid returns the refusal of a request with a field that is invalid for every engine.
func invalid(field, why string) error {
	return &refusal{reason: rejectUnsupported, status: http.StatusBadRequest, code: "invalid_request", message: field + ": " + why}
}

// checkFields returns an error with the first field that the planned router does not support.
func checkFields(f fields) error {
	for _, name := range notPlanned {
		if f.get(name) != nil {
			return unsupported(name, "the KV of the prompt depends on it")
		}
	}
	return nil
}

// onePrompt returns the only prompt of a completion request: a text, or a list of token ids.
func onePrompt(raw json.RawMessage) (json.RawMessage, error) {
	if raw == nil {
		return nil, invalid("prompt", "there is none")
	}
	if raw[0] != '[' {
		return raw, nil
	}
	inner := raw[afterSpace(raw, 1)]
	if inner != '"' && inner != '[' {
		return raw, nil // token ids
	}
	var each []json.RawMessage
	if err := json.Unmarshal(raw, &each); err != nil {
		return nil, invalid("prompt", err.Error())
	}
	if len(each) != 1 {
		return nil, unsupported("prompt", fmt.Sprintf("the list has %d prompts; send one request for each", len(each)))
	}
	return each[0], nil
}

// tokensOf returns the tokens of a request's prompt: the token ids in the request, for a chat the token
// ids from renderPath if the engines serve it, or else the token ids from an engine's /tokenize. If resp is not nil, it is the
// refusal of that engine, and it is passed to the client.
func (r *planned) tokensOf(out *http.Request, req *request) (tokens []kv.Token, resp *http.Response, err error) {
	if err := checkFields(req.fields); err != nil {
		return nil, nil, err
	}
	var ask payload
	if isChat(out) {
		if req.fields.get("messages") == nil {
			return nil, nil, invalid("messages", "there are none")
		}
		// If no engine answers, /tokenize does, or has the reason for the client.
		if tokens = r.renderText(out, req); tokens != nil {
			return tokens, nil, nil
		}
		ask = req.fields.only(chatFields...).edited()
	} else {
		prompt, err := onePrompt(req.fields.get("prompt"))
		if err != nil {
			return nil, nil, err
		}
		switch prompt[0] {
		case '[':
			if err := json.Unmarshal(prompt, &tokens); err != nil {
				return nil, nil, invalid("prompt", "want a text or a list of token ids: "+err.Error())
			}
		case '"':
			ask = req.fields.only(textFields...).edited(edit{"prompt", prompt})
		default:
			return nil, nil, invalid("prompt", "want a text or a list of token ids")
		}
	}
	if ask != nil {
		if tokens, resp, err = r.tokenize(out, ask); resp != nil || err != nil {
			return nil, resp, err
		}
	}
	if len(tokens) == 0 {
		return nil, nil, invalid("prompt", "it has no tokens")
	}
	return tokens, nil, nil
}

// isChat reports whether a request is a chat completion.
func isChat(out *http.Request) bool { return strings.HasSuffix(out.URL.Path, "/chat/completions") }

// tokenize sends the request to an engine and, after a failure, to another engine. If an engine
// refuses the request (4xx), its response is returned for the client.
func (r *planned) tokenize(out *http.Request, ask payload) ([]kv.Token, *http.Response, error) {
	f := r.front
	maxBytes := tokenBytes*ask.size() + answerBytes
	if !f.bodies.TryAcquire(maxBytes) {
		return nil, nil, busy(rejectMemory, noMemory)
	}
	defer f.bodies.Release(maxBytes)
	resp, err := f.ask(out, http.MethodPost, "/tokenize", ask)
	if err != nil {
		if out.Context().Err() == nil {
			f.metrics.tokenizeErrors.Inc()
		}
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK {
		f.metrics.tokenizeErrors.Inc()
		if resp.StatusCode >= 400 && resp.StatusCode < 500 {
			return nil, resp, nil
		}
	}
	defer resp.Body.Close()
	tokens, err := tokensIn(resp, maxBytes)
	if err == nil {
		return tokens, nil, nil
	}
	if out.Context().Err() != nil {
		return nil, nil, err
	}
	if resp.StatusCode == http.StatusOK {
		f.metrics.tokenizeErrors.Inc()
	}
	return nil, nil, &refusal{reason: rejectEngines, status: http.StatusBadGateway, code: "tokenize_failed", message: fmt.Sprintf("%s: POST /tokenize: %v", resp.Body.(*answer).engine.name, err)}
}

// tokensIn decodes the response of /tokenize, which may have at most maxBytes bytes.
func tokensIn(resp *http.Response, maxBytes int64) ([]kv.Token, error) {
	var got struct {
		Tokens []kv.Token `json:"tokens"`
	}
	if err := decode(resp, maxBytes, &got); err != nil {
		return nil, err
	}
	if got.Tokens == nil {
		return nil, errors.New("the response has no list of tokens")
	}
	return got.Tokens, nil
}

// set reports whether a request has a field that is not false.
func set(f fields, name string) bool {
	value := f.get(name)
	return value != nil && string(value) != "false"
}

// wantsPromptLogprobs reports whether vLLM returns the logprobs of the prompt's tokens, for which the
// engine computes the whole prompt.
func wantsPromptLogprobs(f fields, chat bool) bool {
	return f.get("prompt_logprobs") != nil || set(f, "echo") && (chat || f.get("logprobs") != nil)
}

// outputTokens returns the number of tokens that a request may generate. If the request has no such
// number, it returns the default, which is the argument named otherwise.
func outputTokens(f fields, chat bool, otherwise int) (int, error) {
	names := []string{"max_tokens"}
	if chat {
		names = []string{"max_completion_tokens", "max_tokens"}
	}
	for _, name := range names {
		given := f.get(name)
		if given == nil {
			continue
		}
		n, err := strconv.ParseInt(string(given), 10, 32)
		if err != nil || n < 0 {
			return 0, invalid(name, fmt.Sprintf("it is %.20s; want a whole number from 0 to %d", given, math.MaxInt32))
		}
		return int(n), nil
	}
	return otherwise, nil
}
